// Conversions between floats and integer codes on the device.
//
// A division per element would cost more than the memory traffic, so codes come from a product with
// the reciprocal, which is off by less than 2^-15 from the rounded quotient for all that is below
// 128: 2^-23 relative of the reciprocal, and half a unit in the last place of the quotient. It
// rounds to the same integer unless it is that close to a tie: then, and for NaN and infinities,
// the exact division is done.
#pragma once

#include "../common/ints.h"
#include "fp8_device.cuh"

namespace ixt {

constexpr float kSafe = 0.5f - 0x1p-15f;  // distance from an integer that leaves no doubt

// extent / Steps, correctly rounded where the result is a normal number: the product with the
// rounded constant 1 / Steps, corrected once. True for every mantissa and 127, 15 and 7 (checked
// one by one), hence for every exponent.
template <int Steps>
__device__ __forceinline__ float int_scale(float extent) {
  constexpr float inverse = 1.0f / Steps;
  const float finite = fminf(extent, kFloatMax);
  const float quotient = __fmul_rn(finite, inverse);
  const float rest = __fmaf_rn(-quotient, static_cast<float>(Steps), finite);
  return fmaxf(__fmaf_rn(rest, inverse, quotient), kSmallestScale);
}

struct Reciprocal {
  float inverse;

  __device__ __forceinline__ explicit Reciprocal(float scale) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));  // both are normal numbers
  }

  // v / scale rounded half to even, plus kRounder; `safe` becomes false where that is in doubt.
  __device__ __forceinline__ float round(float v, bool& safe) const {
    const float shifted = __fmaf_rn(v, inverse, kRounder);
    const float distance = __fmaf_rn(v, inverse, __fsub_rn(kRounder, shifted));
    safe &= fabsf(distance) < kSafe;  // && would test one element after the other
    return shifted;
  }

  __device__ __forceinline__ bool in_doubt(float v) const {
    bool safe = true;
    round(v, safe);
    return !safe;
  }
};

// The format of rows.cuh and flat.cuh; its scale divides, and is stored as it is.
struct Int8 {};

template <>
IXT_HD float scale_from_amax<Int8>(float amax, const ScaleRule&) {
  return int_scale(amax, kInt8Max);
}

template <>
__device__ __forceinline__ float stored_scale<Int8>(float scale) {
  return scale;
}

__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <>
__device__ __forceinline__ uint32_t encode_one<Int8>(float v, float scale) {
  return static_cast<uint8_t>(int_code(v, scale, -kInt8Max, kInt8Max));
}

template <>
__device__ __forceinline__ uint32_t encode_four<Int8>(const float* v, float scale) {
  const Reciprocal by(scale);
  bool safe = true;
  uint32_t code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = __float_as_uint(by.round(v[i], safe));
  if (!safe) {
#pragma unroll
    for (int i = 0; i < 4; ++i) code[i] = encode_one<Int8>(v[i], scale);
  }
  return low_bytes(code[0], code[1], code[2], code[3]);
}

// Bytes as integers of 0..255 in the mantissa of 2^23; the sign bit is flipped before.
template <>
__device__ __forceinline__ float2 decode_pair<Int8>(uint32_t pair) {
  constexpr float bias = 8388608.0f + 128.0f;
  const uint32_t biased = pair ^ 0x8080u;
  return {__uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7440)) - bias,
          __uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7441)) - bias};
}

}  // namespace ixt
