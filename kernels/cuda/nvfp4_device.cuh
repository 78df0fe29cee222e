// Sixteen elements of a thread -> sixteen e2m1 codes and the scale that they share.
//
// Hopper and older GPUs have no instruction for e2m1, so the arithmetic is counted: integer
// operations run at half the rate of fp32 ones, and a copy leaves about 20 instructions an element.
#pragma once

#include "fp8_device.cuh"
#include "nvfp4_launch.h"

namespace ixt {

// Raw elements: 8 words of two 16-bit numbers, or 16 of one fp32, in order.
template <typename T>
struct Block16 {
  static constexpr int kWords = 16 * sizeof(T) / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const T* x, bool wide) {
    if (wide) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(x) + i);
        memcpy(word + 4 * i, &raw, 16);
      }
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 16; ++i) word[i] = __ldg(reinterpret_cast<const uint32_t*>(x) + i);
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        word[i] = __ldg(halves + 2 * i) | (static_cast<uint32_t>(__ldg(halves + 2 * i + 1)) << 16);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }

  __device__ __forceinline__ float amax() const {
    Amax<T> best;
#pragma unroll
    for (int i = 0; i < kWords; ++i) best.add(word[i]);
    return best.value();
  }

  __device__ __forceinline__ void floats(float (&out)[16]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack<T>(word[i], out + i * (16 / kWords));
  }

  // A NaN becomes +inf, whose code is the one that is defined for NaN.
  __device__ __forceinline__ void drop_nan() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        word[i] = bit_copy<uint32_t>(__hmin2(bit_copy<__nv_bfloat162>(word[i]),
                                             bit_copy<__nv_bfloat162>(0x7F807F80u)));
      } else if constexpr (std::is_same_v<T, f16>) {
        word[i] = bit_copy<uint32_t>(__hmin2(bit_copy<__half2>(word[i]),
                                             bit_copy<__half2>(0x7C007C00u)));
      } else {
        word[i] = __float_as_uint(fminf(__uint_as_float(word[i]), __uint_as_float(kFloatInf)));
      }
    }
  }

  // The byte with the sign of element 8 * half + 2 * i + odd, for i = 0..3.
  __device__ __forceinline__ uint32_t sign_bytes(int half, int odd) const {
    if constexpr (sizeof(T) == 2) {
      const uint32_t* w = word + 4 * half;
      const uint32_t select = odd ? 0x0073 : 0x0051;
      return __byte_perm(__byte_perm(w[0], w[1], select), __byte_perm(w[2], w[3], select), 0x5410);
    } else {
      const uint32_t* w = word + 8 * half + odd;
      return __byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[4], w[6], 0x0073), 0x5410);
    }
  }
};

// The transform of docs/nvfp4.md, with its result in bf16.
template <typename T>
__device__ __forceinline__ Block16<bf16> hadamard(const Block16<T>& block) {
  float a[16];
  block.floats(a);
  hadamard16(a);
  Block16<bf16> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) result.word[i] = pack_pair<bf16>(a[2 * i], a[2 * i + 1]);
  return result;
}

// The largest power of two that is not above v, as a float; at least 1/8 (which stands for 1).
__device__ __forceinline__ float floor_power(float v) {
  return fmaxf(__uint_as_float(__float_as_uint(v) & kFloatInf), 0.125f);
}

constexpr float kCount = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// Bits that have the code of |v| in their lower half, rounded to nearest. The codes count steps of
// 1/2 up to 2, of 1 up to 4 and of 2 up to 6; at most one of the three parts is not an integer, so
// there is one rounding. All of it runs at the rate of fp32, where bit operations take twice that.
__device__ __forceinline__ uint32_t to_nearest(float v) {
  const float a = fabsf(v);
  const float to_2 = __saturatef(__fmul_rn(a, 0.5f));
  const float to_4 = __saturatef(__fmaf_rn(a, 0.5f, -1.0f));
  const float to_6 = __saturatef(__fmaf_rn(a, 0.5f, -2.0f));
  const float count = __fmaf_rn(to_4, 2.0f, __fmaf_rn(to_2, 4.0f, kCount));
  return __float_as_uint(__fadd_rn(count, to_6));
}

// The same for stochastic rounding: up with the probability that byte `i` of `random` gives.
__device__ __forceinline__ uint32_t stochastic(float v, uint32_t random, int i) {
  const float a = __saturatef(__fmul_rn(fabsf(v), 0.125f));
  // 64 + byte / 512 has the byte in bits 8 to 15; half of u = byte / 256 suits the step p / 2.
  const uint32_t bits = __byte_perm(random, 0x42800000u, 0x7604 + (i << 4));
  const float half_u = __uint_as_float(bits) - 64.0f;
  const float t = __fmaf_rn(half_u, floor_power(a), a);  // the product is exact
  const uint32_t code = fp4_code(__float_as_uint(__fmaf_rz(floor_power(t), kFp4MagicEighth, t)));
  return min(code & 15u, 7u);  // an 8 is beyond the largest code
}

// Codes of 16 elements without NaN, times `multiplier`; `random` where rounding is stochastic.
template <bool Stochastic, typename T>
__device__ __forceinline__ uint2 encode16(const Block16<T>& block, float multiplier,
                                          const RandomWords& random) {
  float x[16];
  block.floats(x);
  uint32_t result[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t quads[2];  // four codes in the lower half of each
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t packed = 0;
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const float scaled = __fmul_rn(x[8 * half + 4 * q + i], multiplier);
        packed = packed * 16 + (Stochastic ? stochastic(scaled, random.word[2 * half + q], i)
                                           : to_nearest(scaled));
      }
      quads[q] = packed;
    }
    uint32_t codes = __byte_perm(quads[0], quads[1], 0x5410);
    codes |= (block.sign_bytes(half, 0) >> 4) & 0x08080808u;
    codes |= block.sign_bytes(half, 1) & 0x80808080u;
    result[half] = codes;
  }
  return make_uint2(result[0], result[1]);
}

// The global scales that the blocks of one row share, and the random bits.
struct Fp4Shared {
  Fp4Global whole;
  RandomKey key;
};

__device__ __forceinline__ Fp4Shared fp4_shared(const Fp4Result& y, const int64_t* rng,
                                                uint32_t stream) {
  Fp4Shared shared{};
  if (!y.amax_per_row) shared.whole = fp4_global(__ldg(y.amax));
  if (rng != nullptr) {
    shared.key = {static_cast<uint64_t>(__ldg(rng)), static_cast<uint64_t>(__ldg(rng + 1)), stream};
  }
  return shared;
}

// The scale of a block from its amax, and what it makes of the elements.
struct Fp4Scale {
  uint32_t code;
  float multiplier;

  __device__ __forceinline__ Fp4Scale(float amax, const Fp4Global& global) {
    code = encode_pair<E4M3>(fp4_scale(amax, global), 0.0f) & 0xFFu;
    multiplier = fp4_multiplier(decode_pair<E4M3>(code).x, global);
  }
};

__device__ __forceinline__ Fp4Global global_of(const Fp4Result& y, const Fp4Shared& shared,
                                               uint32_t row) {
  return y.amax_per_row ? fp4_global(__ldg(y.amax + row)) : shared.whole;
}

// Quantize the block `index` of the result, with the scale given.
template <typename T>
__device__ __forceinline__ uint2 quantize16(Block16<T>& block, float multiplier, bool random,
                                            const RandomKey& key, uint64_t index) {
  block.drop_nan();
  if (random) {
    return encode16<true>(block, multiplier, philox_block(index, key));
  }
  return encode16<false>(block, multiplier, RandomWords{});
}

// The scale codes of four neighbouring lanes, in the order of the lanes.
__device__ __forceinline__ uint32_t gather4(uint32_t code) {
  uint32_t word = code << (8 * (threadIdx.x % 4));
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  return word | __shfl_xor_sync(0xFFFFFFFFu, word, 2);
}

// Four words of four neighbouring lanes as a matrix of bytes, transposed.
__device__ __forceinline__ uint32_t transpose4(uint32_t word) {
  const uint32_t far = __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  word = __byte_perm(word, far, threadIdx.x & 2 ? 0x3276 : 0x5410);
  const uint32_t near = __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  return __byte_perm(word, near, threadIdx.x & 1 ? 0x3715 : 0x6240);
}

}  // namespace ixt
