// Branch-free loops that the compiler vectorizes. IXT_ISA names the instruction set of this build.
//
// Everything but the table's getter is local to the file: a function shared between builds for
// different instruction sets would be merged by the linker, and the wrong one might be kept.
#include "fp8_loops.h"

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

// Largest magnitude, found on the bits as integers: NaN lies above inf and counts as 0.
template <typename T, typename Int>
IXT_HD Int amax_bits(const typename T::Word* x, int64_t n) {
  constexpr Int mask = static_cast<Int>(~(typename T::Word(1) << (8 * sizeof(Int) - 1)));
  Int best = 0;
  for (int64_t i = 0; i < n; ++i) {
    Int mag = static_cast<Int>(x[i]) & mask;
    mag = mag > static_cast<Int>(T::inf) ? Int(0) : mag;
    best = best > mag ? best : mag;
  }
  return best;
}

template <typename T>
float amax(const void* x, int64_t n) {
  const auto* words = static_cast<const typename T::Word*>(x);
  if constexpr (sizeof(typename T::Word) == 2) {
    return T::load(static_cast<uint16_t>(amax_bits<T, int16_t>(words, n)));
  } else {
    return T::load(static_cast<uint32_t>(amax_bits<T, int32_t>(words, n)));
  }
}

template <typename T, typename Format>
void quantize(const void* x, uint8_t* __restrict q, int64_t n, float scale) {
  const auto* __restrict words = static_cast<const typename T::Word*>(x);
  for (int64_t i = 0; i < n; ++i) q[i] = encode_fp8<Format>(T::load(words[i]) * scale);
}

template <typename T, typename Format>
void dequantize(const uint8_t* __restrict q, void* y, int64_t n, float scale_inv) {
  auto* __restrict words = static_cast<typename T::Word*>(y);
  for (int64_t i = 0; i < n; ++i) words[i] = T::store(decode_fp8<Format>(q[i]) * scale_inv);
}

template <typename T>
constexpr Fp8Loops loops() {
  return {&amax<T>,
          {&quantize<T, E4M3>, &quantize<T, E5M2>},
          {&dequantize<T, E4M3>, &dequantize<T, E5M2>}};
}

constexpr Fp8LoopTable table = {IXT_TEXT(IXT_ISA), loops<F32>(), loops<F16>(), loops<BF16>()};

}  // namespace

const Fp8LoopTable* IXT_CONCAT(fp8_loops_, IXT_ISA)() { return &table; }

}  // namespace ixt
