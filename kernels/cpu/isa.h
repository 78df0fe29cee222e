// Picks the loops of the best instruction set that this machine has.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

#include "../common/op_args.h"

namespace ixt {

enum class Isa { baseline, v3, v4 };

inline Isa present_isa() {
#if defined(IXT_HAVE_V3) || defined(IXT_HAVE_V4)
  __builtin_cpu_init();
#endif
#if defined(IXT_HAVE_V4)
  if (__builtin_cpu_supports("x86-64-v4")) return Isa::v4;
#endif
#if defined(IXT_HAVE_V3)
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::v3;
#endif
  return Isa::baseline;
}

// What the machine has, or less if INDUCTOR_EXT_CPU_ISA names it: for tests and comparisons.
inline Isa best_isa() {
  const Isa present = present_isa();
  const char* wanted = std::getenv("INDUCTOR_EXT_CPU_ISA");
  if (!wanted) return present;
  const std::string name = wanted;
  IXT_CHECK(name == "baseline" || name == "v3" || name == "v4",
            "`INDUCTOR_EXT_CPU_ISA` must be baseline, v3 or v4, got ", name);
  const Isa asked = name == "v4" ? Isa::v4 : name == "v3" ? Isa::v3 : Isa::baseline;
  return std::min(asked, present);
}

// name_v4(), name_v3() or name_baseline(), of those that were compiled.
#if defined(IXT_HAVE_V4) && defined(IXT_HAVE_V3)
#define IXT_BEST_OF(name)                            \
  (::ixt::best_isa() == ::ixt::Isa::v4   ? name##_v4() \
   : ::ixt::best_isa() == ::ixt::Isa::v3 ? name##_v3() \
                                         : name##_baseline())
#elif defined(IXT_HAVE_V3)
#define IXT_BEST_OF(name) (::ixt::best_isa() == ::ixt::Isa::v3 ? name##_v3() : name##_baseline())
#else
#define IXT_BEST_OF(name) name##_baseline()
#endif

// The entry of a table {f32, f16, bf16} of loops.
template <typename Table>
const auto& loops_of(const Table& table, Float dtype) {
  return dtype == Float::bf16 ? table.bf16 : dtype == Float::f16 ? table.f16 : table.f32;
}

inline int64_t item_size(Float dtype) { return dtype == Float::f32 ? 4 : 2; }

}  // namespace ixt
