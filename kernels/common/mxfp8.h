// MXFP8 scales: from an amax to the e8m0 exponent and its inverse, shared by CPU and CUDA kernels.
#pragma once

#include "fp8.h"

namespace ixt {

constexpr uint32_t kE8m0Tiny = 0x00400000u;  // 2^-127 as fp32
constexpr uint32_t kQuietNan = 0x7FC00000u;

// fl(1 / max_finite): 1/448 is not exact, 1/57344 neither.
template <typename Format>
constexpr uint32_t kInverseMaxBits = Format::mantissa == 3 ? 0x3B124925u : 0x37924925u;

// Exponent of the largest power of two in the format: 8 for e4m3, 15 for e5m2.
template <typename Format>
constexpr int32_t kMaxExponent = Format::mantissa == 3 ? 8 : 15;

// Round up: the smallest power of two that brings `amax` (not NaN) below the largest code.
template <typename Format>
IXT_HD uint32_t e8m0_ceil(float amax) {
  const uint32_t bits = bit_copy<uint32_t>(amax * bit_copy<float>(kInverseMaxBits<Format>));
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFFu;
  // Infinity (exponent 255) becomes 254; exponent 254 never rounds up; a subnormal of at most
  // half of the smallest normal number is 2^-127, the code 0.
  const bool up = mantissa > 0 && exponent < 254 && !(exponent == 0 && mantissa <= kE8m0Tiny);
  return exponent >= 254 ? 254u : exponent + (up ? 1u : 0u);
}

// OCP's rule: the exponent of amax, less that of the largest code.
template <typename Format>
IXT_HD uint32_t e8m0_floor(float amax) {
  const int32_t exponent = static_cast<int32_t>(bit_copy<uint32_t>(amax) >> 23);
  const int32_t e = exponent - kMaxExponent<Format>;
  return static_cast<uint32_t>(e < 0 ? 0 : e > 254 ? 254 : e);
}

// What an element is multiplied by.
IXT_HD float e8m0_inverse(uint32_t e) {
  const uint32_t bits = e == 254 ? kE8m0Tiny : (254u - e) << 23;
  return bit_copy<float>(e == 255 ? kQuietNan : bits);
}

// What a code is multiplied by.
IXT_HD float e8m0_value(uint32_t e) {
  const uint32_t bits = e == 0 ? kE8m0Tiny : e << 23;
  return bit_copy<float>(e == 255 ? kQuietNan : bits);
}

}  // namespace ixt
