// INT8 and INT4: scales and rounding, shared by the CPU and the CUDA kernels.
#pragma once

#include "fp8.h"

namespace ixt {

constexpr float kSmallestScale = 0x1p-126f;  // a scale is never 0 nor subnormal
constexpr float kInt8Max = 127.0f;

// 1.5 * 2^23: the sum of it and a number below 2^22 is that number rounded half to even, in the
// low bits of the mantissa as a two's complement integer.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4B400000;

// The scale that spreads [0, extent] over `steps` codes. An infinite extent counts as the largest
// fp32, so that a code never dequantizes to NaN.
IXT_HD float int_scale(float extent, float steps) {
  const float finite = extent > kFloatMax ? kFloatMax : extent;
  const float scale = div_ieee(finite, steps);
  return scale < kSmallestScale ? kSmallestScale : scale;
}

// x / scale rounded half to even and clamped; 0 for NaN.
IXT_HD int32_t int_code(float x, float scale, float low, float high) {
  float v = div_ieee(x, scale);
  v = v != v ? 0.0f : v;
  v = v < low ? low : v;
  v = v > high ? high : v;
  return bit_copy<int32_t>(v + kRounder) - kRounderBits;
}

// Asymmetric INT4: how far a group reaches below and above 0, NaN skipped.
struct Extent {
  float below;
  float above;
};

constexpr float kAsymmetricSteps = 15.0f;

IXT_HD float asymmetric_scale(const Extent& e) {
  return int_scale(e.above + e.below, kAsymmetricSteps);
}

IXT_HD int32_t asymmetric_zero(const Extent& e, float scale) {
  return int_code(e.below, scale, 0.0f, kAsymmetricSteps);
}

IXT_HD int32_t asymmetric_code(float x, float scale, int32_t zero) {
  const int32_t code = int_code(x, scale, -kAsymmetricSteps, kAsymmetricSteps) + zero;
  return code < 0 ? 0 : code > 15 ? 15 : code;
}

}  // namespace ixt
