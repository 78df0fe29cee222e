// NVFP4: e2m1 codes, their scales and the Hadamard transform, shared by the CPU and CUDA kernels.
//
// e2m1 has 1 sign, 2 exponent and 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN.
// A `min` of two floats takes the number where the other is NaN, as fminf does.
#pragma once

#include "fp8.h"

namespace ixt {

constexpr int64_t kFp4Block = 16;
constexpr float kFp4Range = 2688.0f;           // 6, the largest code, times 448, the largest scale
constexpr float kFp4Sixth = 1.0f / 6.0f;       // rounded to fp32
constexpr float kFp4Decode = 1.0f / 2688.0f;   // rounded to fp32

// Adding p * kFp4Magic to a number in [p, 2p), p a power of two, rounds it to the grid p / 2 of
// e2m1 there (for p = 1: from 0 on). With t the bits of the sum, the low 16 bits of t + (t >> 22)
// are the code: the sum's mantissa holds the count of grid steps, its exponent gives twice p's, and
// the constant is chosen so that what else they hold adds up to 2^16. kFp4MagicEighth is the same
// for numbers that were divided by 8.
constexpr float kFp4Magic = 4194304.0f + 32619.0f;
constexpr float kFp4MagicEighth = 4194304.0f + 32622.0f;

IXT_HD uint32_t fp4_code(uint32_t sum_bits) { return sum_bits + (sum_bits >> 22); }

// What all blocks that share an amax have in common.
struct Fp4Global {
  float encode_sixth;  // 1/6 of the global encode scale
  float decode;        // the reciprocal of the global encode scale
};

IXT_HD float rcp_ieee(float v) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(v);
#else
  return 1.0f / v;
#endif
}

IXT_HD float min_with_max(float v) { return v < kFloatMax ? v : kFloatMax; }

IXT_HD Fp4Global fp4_global(float amax) {
  float encode = min_with_max(div_ieee(kFp4Range, amax));
  encode = amax == 0.0f || encode == 0.0f ? 1.0f : encode;
  return {encode * kFp4Sixth, rcp_ieee(encode)};
}

// What the e4m3 scale of a block is rounded from.
IXT_HD float fp4_scale(float block_amax, const Fp4Global& global) {
  return min_with_max(block_amax * global.encode_sixth);
}

// What the elements of a block are multiplied by; `scale` is a value of e4m3.
IXT_HD float fp4_multiplier(float scale, const Fp4Global& global) {
  return min_with_max(rcp_ieee(scale * global.decode));
}

// What the codes of a block are multiplied by.
IXT_HD float fp4_factor(float scale, float amax) { return (scale * amax) * kFp4Decode; }

// The transform of 16 elements: signs, butterflies in a fixed order, a quarter. The result is to
// be rounded to bf16. Each T has the operators of float.
constexpr uint32_t kHadamardNegative = 0xD7E8u;  // bit i: element i changes its sign

template <typename T>
IXT_HD void hadamard16(T (&a)[16]) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < 16; ++i) {
    if ((kHadamardNegative >> i) & 1u) a[i] = -a[i];
  }
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int h = 1; h < 16; h *= 2) {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < 16; ++i) {
      if (i & h) continue;
      const T low = a[i];
      const T high = a[i + h];
      a[i] = low + high;
      a[i + h] = low - high;
    }
  }
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < 16; ++i) a[i] = a[i] * 0.25f;
}

}  // namespace ixt
