// Conversions between packed float vectors and FP8 codes on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common.cuh"

namespace ixt {

using bf16 = __nv_bfloat16;
using f16 = __half;

// Elements of one 16-byte access.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

template <int Words, typename R>
__device__ __forceinline__ void to_words(const R& raw, uint32_t (&words)[Words]) {
  if constexpr (sizeof(R) < 4) {
    words[0] = raw;
  } else {
    memcpy(words, &raw, sizeof(R));
  }
}

template <int Bytes>
constexpr int kWords = Bytes < 4 ? 1 : Bytes / 4;

// Largest magnitude, NaN ignored: max returns the operand that is a number, and `acc_` always is.
template <typename T>
class Amax;

template <>
class Amax<float> {
 public:
  __device__ __forceinline__ void add(uint32_t word) {
    acc_ = fmaxf(acc_, fabsf(__uint_as_float(word)));
  }
  __device__ __forceinline__ float value() const { return acc_; }

 private:
  float acc_ = 0.0f;
};

constexpr uint32_t kPairMagnitude = 0x7FFF7FFFu;  // clears the signs of two 16-bit floats

template <>
class Amax<bf16> {
 public:
  __device__ __forceinline__ void add(uint32_t word) {
    acc_ = __hmax2(acc_, bit_copy<__nv_bfloat162>(word & kPairMagnitude));
  }
  __device__ __forceinline__ float value() const {
    const uint32_t bits = bit_copy<uint32_t>(acc_);
    return fmaxf(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  }

 private:
  __nv_bfloat162 acc_ = bit_copy<__nv_bfloat162>(0u);
};

template <>
class Amax<f16> {
 public:
  __device__ __forceinline__ void add(uint32_t word) {
    acc_ = __hmax2(acc_, bit_copy<__half2>(word & kPairMagnitude));
  }
  __device__ __forceinline__ float value() const {
    const float2 pair = __half22float2(acc_);
    return fmaxf(pair.x, pair.y);
  }

 private:
  __half2 acc_ = bit_copy<__half2>(0u);
};

template <typename T, typename R>
__device__ __forceinline__ void add_raw(Amax<T>& amax, const R& raw) {
  uint32_t words[kWords<sizeof(R)>];
  to_words(raw, words);
#pragma unroll
  for (int i = 0; i < kWords<sizeof(R)>; ++i) amax.add(words[i]);
}

// The floats of one 32-bit word: one fp32, or two of 16 bits with the lower half first.
template <typename T>
__device__ __forceinline__ void unpack(uint32_t word, float* out);
template <>
__device__ __forceinline__ void unpack<float>(uint32_t word, float* out) {
  out[0] = __uint_as_float(word);
}
template <>
__device__ __forceinline__ void unpack<bf16>(uint32_t word, float* out) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xFFFF0000u);
}
template <>
__device__ __forceinline__ void unpack<f16>(uint32_t word, float* out) {
  const float2 pair = __half22float2(bit_copy<__half2>(word));
  out[0] = pair.x;
  out[1] = pair.y;
}

// Two codes, `low` in the lower byte. The instruction saturates, rounds to nearest even and makes
// every NaN 0x7F, as encode_fp8 does.
template <typename Format>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (Format::mantissa == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return encode_fp8<Format>(low) | (static_cast<uint32_t>(encode_fp8<Format>(high)) << 8);
#endif
}

// What is stored next to the codes: the multiplier of dequantization.
template <typename Format>
__device__ __forceinline__ float stored_scale(float scale) {
  return __fdiv_rn(1.0f, scale);
}

// Four codes, the first in the lowest byte. The product is rounded on its own: never part of an FMA.
template <typename Format>
__device__ __forceinline__ uint32_t encode_four(const float* v, float scale) {
  return encode_pair<Format>(__fmul_rn(v[0], scale), __fmul_rn(v[1], scale)) |
         encode_pair<Format>(__fmul_rn(v[2], scale), __fmul_rn(v[3], scale)) << 16;
}

template <typename Format>
__device__ __forceinline__ uint32_t encode_one(float v, float scale) {
  return encode_pair<Format>(__fmul_rn(v, scale), 0.0f);
}

template <typename T, int Words>
constexpr int kFloats = sizeof(T) == 4 ? Words : 2 * Words;

template <typename T, int Words>
__device__ __forceinline__ void unpack_all(const uint32_t (&words)[Words],
                                           float (&out)[kFloats<T, Words>]) {
#pragma unroll
  for (int i = 0; i < Words; ++i) unpack<T>(words[i], out + i * kFloats<T, 1>);
}

// N floats and their scale -> N codes.
template <typename T, typename Format, int N>
__device__ __forceinline__ Raw<N> quantize(const Raw<N * sizeof(T)>& raw, float scale) {
  constexpr int words = kWords<N * sizeof(T)>;
  uint32_t in[words];
  float v[kFloats<T, words>];
  to_words(raw, in);
  unpack_all<T>(in, v);
  if constexpr (N == 1) {
    return static_cast<Raw<1>>(encode_one<Format>(v[0], scale));
  } else {
    uint32_t out[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) out[i] = encode_four<Format>(v + 4 * i, scale);
    Raw<N> result;
    memcpy(&result, out, N);
    return result;
  }
}

template <typename Format>
__device__ __forceinline__ float2 decode_pair(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  const uint16_t codes = static_cast<uint16_t>(pair);
  if constexpr (Format::mantissa == 3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  }
  return __half22float2(bit_copy<__half2>(halves));
#else
  return {decode_fp8<Format>(static_cast<uint8_t>(pair)),
          decode_fp8<Format>(static_cast<uint8_t>(pair >> 8))};
#endif
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(low);
  } else if constexpr (std::is_same_v<T, bf16>) {
    return bit_copy<uint32_t>(__floats2bfloat162_rn(low, high));
  } else {
    return bit_copy<uint32_t>(__floats2half2_rn(low, high));
  }
}

// N codes -> N values: float(code) * scale_inv, rounded to T.
template <typename T, typename Format, int N>
__device__ __forceinline__ Raw<N * sizeof(T)> dequantize(const Raw<N>& codes, float scale_inv) {
  if constexpr (N == 1) {
    const float2 pair = decode_pair<Format>(codes);
    return static_cast<Raw<sizeof(T)>>(pack_pair<T>(__fmul_rn(pair.x, scale_inv), 0.0f));
  } else {
    uint32_t in[N / 4];
    uint32_t out[N * sizeof(T) / 4];
    to_words(codes, in);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = decode_pair<Format>(in[i / 2] >> (16 * (i % 2)));
      const float low = __fmul_rn(pair.x, scale_inv);
      const float high = __fmul_rn(pair.y, scale_inv);
      if constexpr (sizeof(T) == 4) {
        out[2 * i] = __float_as_uint(low);
        out[2 * i + 1] = __float_as_uint(high);
      } else {
        out[i] = pack_pair<T>(low, high);
      }
    }
    Raw<N * sizeof(T)> result;
    memcpy(&result, out, sizeof(result));
    return result;
  }
}

}  // namespace ixt
