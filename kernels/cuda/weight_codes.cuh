// Codes of weights -> pairs of bf16 or fp16 that the tensor cores take. Every value is exact.
//
// A thread has eight codes of a row: 8 bytes, or 4 with the even index in the low nibble. They
// become four words; of 8-bit codes these are (0, 1), (2, 3), (4, 5), (6, 7), of 4-bit codes, where
// it saves shifts, (0, 4), (1, 5), (2, 6), (3, 7). `aid` is what a group of codes shares, made
// of a byte, `flip` what all codes do.
#pragma once

#include "weights.h"
#include "weights_ptx.cuh"

namespace ixt {

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;

template <typename T>
__device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
  return bit_copy<uint32_t>(__hsub2(bit_copy<Pair<T>>(a), bit_copy<Pair<T>>(b)));
}

template <typename T>
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  return bit_copy<uint32_t>(__hmul2(bit_copy<Pair<T>>(a), bit_copy<Pair<T>>(b)));
}

// Both halves of a word.
__device__ __forceinline__ constexpr uint32_t twice(uint32_t half) { return half * 0x10001u; }

template <typename T>
constexpr bool kIsBf16 = std::is_same_v<T, bf16>;

// A small integer n in the mantissa: 128 + n in bf16 (n < 128), 1024 + n in fp16 (n < 1024).
template <typename T>
constexpr uint32_t kMagic = twice(kIsBf16<T> ? 0x4300u : 0x6400u);

template <Code C, typename T>
struct Decoder;

template <typename T>
struct Decoder<Code::int8, T> {
  static constexpr int bits = 8;
  __device__ __forceinline__ static uint32_t aid(uint32_t) { return 0; }
  __device__ __forceinline__ static void pairs(uint2 codes, uint32_t, uint32_t, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? codes.x : codes.y;
      if constexpr (kIsBf16<T>) {
        // The low seven bits less the sign bit, which weighs 128; both on top of 128.
        const uint32_t all = __byte_perm(word, kMagic<T>, i % 2 ? 0x7372 : 0x7170);
        out[i] = minus<T>(all & 0xFF7FFF7Fu, all & 0xFF80FF80u);
      } else {
        const uint32_t moved = __byte_perm(word ^ 0x80808080u, kMagic<T>, i % 2 ? 0x7372 : 0x7170);
        out[i] = minus<T>(moved, twice(0x6480u));  // 1024 + 128
      }
    }
  }
};

template <typename Format, typename T>
struct Fp8Decoder {
  static constexpr int bits = 8;
  __device__ __forceinline__ static uint32_t aid(uint32_t) { return 0; }
  __device__ __forceinline__ static void pairs(uint2 codes, uint32_t, uint32_t, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = (i < 2 ? codes.x : codes.y) >> (16 * (i % 2));
      if constexpr (kIsBf16<T>) {
        const float2 v = decode_pair<Format>(pair);
        out[i] = pack_pair<T>(v.x, v.y);
      } else {
        out[i] = halves_of<Format>(pair);
      }
    }
  }
};

template <typename T>
struct Decoder<Code::e4m3, T> : Fp8Decoder<E4M3, T> {};
template <typename T>
struct Decoder<Code::e5m2, T> : Fp8Decoder<E5M2, T> {};

// aid: the zero point, on top of the same number as the codes; flip: that number, and the sign bits
// of symmetric codes, which are two's complement: with them flipped, the zero point is 8.
template <typename T>
struct Decoder<Code::int4, T> {
  static constexpr int bits = 4;
  __device__ __forceinline__ static uint32_t aid(uint32_t zero) { return kMagic<T> | twice(zero); }
  __device__ __forceinline__ static void pairs(uint32_t codes, uint32_t aid, uint32_t flip,
                                               uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = minus<T>(and_xor(codes >> (4 * i), twice(15u), flip), aid);
    }
  }
};

// aid: the scale of the group. Exponent and mantissa of a code, put at the lower end of the
// exponent of T, are the value times 2^-126 or 2^-14; the scale comes times 2^117 or 2^7, so the
// product, of six bits at most, is that of code and scale times kValueUnit.
template <typename T>
struct Decoder<Code::e2m1, T> {
  static constexpr int bits = 4;
  static constexpr float kScaleFactor = kIsBf16<T> ? 0x1p117f : 0x1p7f;
  static constexpr float kValueUnit = kIsBf16<T> ? 0x1p-9f : 0x1p-7f;
  __device__ __forceinline__ static uint32_t aid(uint32_t e4m3) {
    const float scale = __fmul_rn(decode_pair<E4M3>(e4m3).x, kScaleFactor);
    return pack_pair<T>(scale, scale);
  }
  __device__ __forceinline__ static void pairs(uint32_t codes, uint32_t aid, uint32_t,
                                               uint32_t (&out)[4]) {
    constexpr int place = kIsBf16<T> ? 6 : 9;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int up = place - 4 * i;
      const uint32_t moved = up >= 0 ? codes << (up >= 0 ? up : 0) : codes >> (up < 0 ? -up : 0);
      const uint32_t sign = (codes << (12 - 4 * i)) & 0x80008000u;
      out[i] = times<T>((moved & twice(7u << place)) | sign, aid);
    }
  }
};

}  // namespace ixt
