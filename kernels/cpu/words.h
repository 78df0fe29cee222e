// How the loops read and write the dtypes of tensors, and the largest magnitude of a run of them.
//
// For files that are compiled once per instruction set, as IXT_ISA. Everything in them but the
// getter of a table is local to the file: a function shared between builds for different
// instruction sets would be merged by the linker, and the wrong one might be kept.
#pragma once

#include <type_traits>

#include "../common/fp8.h"

#define IXT_CONCAT2(a, b) a##b
#define IXT_CONCAT(a, b) IXT_CONCAT2(a, b)
#define IXT_TEXT2(a) #a
#define IXT_TEXT(a) IXT_TEXT2(a)

namespace ixt {
namespace {

struct F32 {
  using Word = uint32_t;
  static constexpr int32_t inf = 0x7F800000;
  static IXT_HD float load(Word w) { return bit_copy<float>(w); }
  static IXT_HD Word store(float v) { return bit_copy<uint32_t>(v); }
};

struct BF16 {
  using Word = uint16_t;
  static constexpr int32_t inf = 0x7F80;
  static IXT_HD float load(Word w) { return bit_copy<float>(static_cast<uint32_t>(w) << 16); }
  static IXT_HD Word store(float v) {
    const uint32_t bits = bit_copy<uint32_t>(v);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Word>((bits & 0x7FFFFFFFu) > kFloatInf ? 0x7FC0u : rounded);
  }
};

struct F16 {
  using Word = uint16_t;
  static constexpr int32_t inf = 0x7C00;
  static IXT_HD float load(Word w) {
    const uint32_t mag = w & 0x7FFFu;
    const uint32_t sign = static_cast<uint32_t>(w & 0x8000u) << 16;
    const float step_count = static_cast<float>(static_cast<int32_t>(mag));
    const uint32_t tiny = bit_copy<uint32_t>(step_count * 0x1p-24f);
    uint32_t bits = (mag << 13) + (112u << 23);
    bits = mag < 0x0400u ? tiny : bits;
    bits = mag >= 0x7C00u ? (mag << 13) | kFloatInf : bits;
    return bit_copy<float>(bits | sign);
  }
  static IXT_HD Word store(float v) {
    const uint32_t bits = bit_copy<uint32_t>(v);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t raw = bits & 0x7FFFFFFFu;
    const uint32_t mag = raw > 0x477FF000u ? 0x477FF000u : raw;  // 65520 and above round to inf
    const uint32_t normal = ((mag + 0xFFFu + ((mag >> 13) & 1u)) >> 13) - (112u << 10);
    const uint32_t tiny = bit_copy<uint32_t>(bit_copy<float>(mag) + 0.5f) - 0x3F000000u;
    uint32_t code = mag < 0x38800000u ? tiny : normal;
    code = raw > kFloatInf ? 0x7E00u : code;
    return static_cast<Word>(code | sign);
  }
};

// The integers that magnitudes are compared as.
template <typename T>
using Magnitude = std::conditional_t<sizeof(typename T::Word) == 2, int16_t, int32_t>;

// |x| as an integer, which orders like the number; NaN lies above inf and counts as 0.
template <typename T>
IXT_HD Magnitude<T> magnitude(typename T::Word x) {
  using Int = Magnitude<T>;
  constexpr Int mask = static_cast<Int>(~(typename T::Word(1) << (8 * sizeof(Int) - 1)));
  const Int mag = static_cast<Int>(x) & mask;
  return mag > static_cast<Int>(T::inf) ? Int(0) : mag;
}

template <typename T>
IXT_HD float magnitude_value(Magnitude<T> mag) {
  return T::load(static_cast<typename T::Word>(mag));
}

template <typename T>
IXT_HD float amax_of(const typename T::Word* x, int64_t n) {
  Magnitude<T> best = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Magnitude<T> mag = magnitude<T>(x[i]);
    best = best > mag ? best : mag;
  }
  return magnitude_value<T>(best);
}

}  // namespace
}  // namespace ixt
