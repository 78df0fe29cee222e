// FP8 number formats and the scale formula, shared by the CPU and the CUDA kernels.
//
// Everything here is plain fp32 and integer arithmetic with IEEE rounding, and free of branches so
// that host compilers vectorize it. Build with -ffp-contract=off and never with -ffast-math.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define IXT_HD __host__ __device__ __forceinline__
#else
#define IXT_HD inline __attribute__((always_inline))
#endif

namespace ixt {

constexpr uint32_t kFloatInf = 0x7F800000u;
constexpr float kFloatMax = 3.4028234663852886e38f;

template <typename To, typename From>
IXT_HD To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size only");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN is S.1111.111.
struct E4M3 {
  static constexpr float max_finite = 448.0f;
  static constexpr uint32_t max_bits = 0x43E00000u;     // 448 as fp32
  static constexpr uint32_t normal_bits = 0x3C800000u;  // 2^-6, the smallest normal, as fp32
  static constexpr uint32_t mantissa = 3;
  static constexpr uint32_t bias = 7;
  static constexpr float denormal_step = 0x1p-9f;
};

// 1 sign, 5 exponent (bias 15), 2 mantissa bits; the upper half of an IEEE fp16.
struct E5M2 {
  static constexpr float max_finite = 57344.0f;
  static constexpr uint32_t max_bits = 0x47600000u;
  static constexpr uint32_t normal_bits = 0x38800000u;  // 2^-14
  static constexpr uint32_t mantissa = 2;
  static constexpr uint32_t bias = 15;
  static constexpr float denormal_step = 0x1p-16f;
};

// Saturate, then round to nearest even; every NaN becomes the code 0x7F, as the hardware gives it.
template <typename Format>
IXT_HD uint8_t encode_fp8(float value) {
  constexpr int32_t shift = 23 - Format::mantissa;
  constexpr int32_t largest = Format::max_bits;
  constexpr int32_t smallest_normal = Format::normal_bits;
  constexpr int32_t inf = kFloatInf;
  const int32_t bits = bit_copy<int32_t>(value);
  const int32_t raw = bits & 0x7FFFFFFF;
  const int32_t mag = raw > largest ? largest : raw;
  int32_t power = mag & inf;  // of two, below the value; subnormals share that of the first normal
  power = power > smallest_normal ? power : smallest_normal;
  // Adding a number whose ulp is the step between codes lets the FPU do the rounding.
  const int32_t magic = power + (shift << 23);
  const int32_t steps = bit_copy<int32_t>(bit_copy<float>(mag) + bit_copy<float>(magic)) - magic;
  const int32_t code = steps + ((power - smallest_normal) >> shift);
  const int32_t nan = (inf - raw) >> 31;  // all ones for NaN
  // Through the top byte: or compilers narrow each term to bytes by itself, which is slow.
  const uint32_t number = static_cast<uint32_t>(code | (nan & 0x7F)) << 24;
  const uint32_t sign = static_cast<uint32_t>(bits & ~nan) & 0x80000000u;
  return static_cast<uint8_t>((number | sign) >> 24);
}

template <typename Format>
IXT_HD float decode_fp8(uint8_t byte) {
  constexpr uint32_t shift = 23 - Format::mantissa;
  constexpr bool ieee = Format::mantissa == 2;  // e5m2 keeps the top exponent for inf and NaN
  constexpr uint32_t first_special = ieee ? 0x7Cu : 0x7Fu;
  const uint32_t code = byte & 0x7Fu;
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  const uint32_t normal = (code << shift) + ((127 - Format::bias) << 23);
  const uint32_t special = ieee ? (kFloatInf | (code << shift)) : 0x7FC00000u;
  const float step_count = static_cast<float>(static_cast<int32_t>(code));
  const uint32_t tiny = bit_copy<uint32_t>(step_count * Format::denormal_step);
  uint32_t bits = code < (1u << Format::mantissa) ? tiny : normal;
  bits = code >= first_special ? special : bits;
  return bit_copy<float>(bits | sign);
}

// How a scale follows from an amax.
struct ScaleRule {
  float eps;       // lower bound of amax
  float overflow;  // replaces an infinite scale
  bool pow2;       // round the scale down to a power of two
};

IXT_HD float div_ieee(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

template <typename Format>
IXT_HD float scale_from_amax(float amax, const ScaleRule& rule) {
  amax = amax < rule.eps ? rule.eps : amax;
  if (amax == 0.0f || bit_copy<uint32_t>(amax) == kFloatInf) return 1.0f;
  float scale = div_ieee(Format::max_finite, amax);
  if (bit_copy<uint32_t>(scale) == kFloatInf) scale = rule.overflow;
  if (rule.pow2) scale = bit_copy<float>(bit_copy<uint32_t>(scale) & 0xFF800000u);
  return scale;
}

}  // namespace ixt
