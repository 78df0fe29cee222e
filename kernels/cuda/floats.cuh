// Sixteen bytes of floats: loads and stores that also serve ragged ends and rows out of step.
#pragma once

#include "fp8_device.cuh"
#include "fp8_launch.h"

namespace ixt {
namespace {

template <typename T>
struct alignas(16) Pack {
  static constexpr int N = kVector<T>;
  T at[N];
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(f16 v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T rounded(float v);
template <>
__device__ __forceinline__ float rounded<float>(float v) { return v; }
template <>
__device__ __forceinline__ bf16 rounded<bf16>(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ f16 rounded<f16>(float v) { return __float2half_rn(v); }

// How many of a pack's elements are inside `cols`.
template <bool Wide, typename T>
__device__ __forceinline__ int inside(int64_t at, int64_t cols) {
  return !Wide && cols - at < Pack<T>::N ? static_cast<int>(cols - at) : Pack<T>::N;
}

// Elements [at, at + N) of a row, zeros behind its end. Wide: packs begin at multiples of 16 bytes,
// and none is cut short.
template <bool Wide, typename T>
__device__ __forceinline__ Pack<T> load(const T* __restrict__ row, int64_t at, int64_t cols) {
  if constexpr (Wide) {
    return bit_copy<Pack<T>>(__ldg(reinterpret_cast<const uint4*>(row + at)));
  } else {
    Pack<T> made;
#pragma unroll
    for (int i = 0; i < Pack<T>::N; ++i) {
      made.at[i] = at + i < cols ? row[at + i] : rounded<T>(0.0f);
    }
    return made;
  }
}

template <bool Wide, typename T>
__device__ __forceinline__ void store(T* __restrict__ row, int64_t at, int64_t cols,
                                      const Pack<T>& pack) {
  if constexpr (Wide) {
    *reinterpret_cast<uint4*>(row + at) = bit_copy<uint4>(pack);
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::N; ++i) {
      if (at + i < cols) row[at + i] = pack.at[i];
    }
  }
}

template <bool Wide, typename T, int N>
__device__ __forceinline__ void to_floats(const T* __restrict__ from, int count, float (&out)[N]) {
  if constexpr (Wide) {
    constexpr int kStep = kVector<T> < N ? kVector<T> : N;
    using Part = Raw<kStep * sizeof(T)>;
#pragma unroll
    for (int i = 0; i < N; i += kStep) {
      const Part part = __ldg(reinterpret_cast<const Part*>(from + i));
      T parts[kStep];
      memcpy(parts, &part, sizeof(part));
#pragma unroll
      for (int j = 0; j < kStep; ++j) out[i + j] = to_float(parts[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = i < count ? to_float(from[i]) : 0.0f;
  }
}

// N elements of a vector that has a dtype of its own.
template <bool Wide, int N>
__device__ __forceinline__ void load_any(const void* data, Float dtype, int64_t at, int64_t cols,
                                         float (&out)[N]) {
  const int count = cols - at < N ? static_cast<int>(cols - at) : N;
  if (dtype == Float::bf16) {
    to_floats<Wide>(static_cast<const bf16*>(data) + at, count, out);
  } else if (dtype == Float::f16) {
    to_floats<Wide>(static_cast<const f16*>(data) + at, count, out);
  } else {
    to_floats<Wide>(static_cast<const float*>(data) + at, count, out);
  }
}

// Their sum, in pairs of pairs: three additions on the way of each of eight.
template <int N>
__device__ __forceinline__ float pairwise_sum(const float (&v)[N]) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    float pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = v[2 * i] + v[2 * i + 1];
    return pairwise_sum(pairs);
  }
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// Sums over the block, in every thread and in an order that depends on nothing but its size.
// `shared` holds `Count` floats a warp, and may be used again at once.
template <int Count>
__device__ __forceinline__ void block_sums(float (&v)[Count], float* shared) {
#pragma unroll
  for (int i = 0; i < Count; ++i) v[i] = warp_sum(v[i]);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return;
  const int lane = threadIdx.x % kWarp;
  __syncthreads();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Count; ++i) shared[threadIdx.x / kWarp * Count + i] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Count; ++i) v[i] = warp_sum(lane < warps ? shared[lane * Count + i] : 0.0f);
}

// Whether rows of packs begin at multiples of 16 bytes.
inline bool is_wide(const void* data, int64_t rows, int64_t stride, int64_t element) {
  return aligned16(data) && (rows <= 1 || stride * element % 16 == 0);
}

inline int64_t element_size(Float dtype) { return dtype == Float::f32 ? 4 : 2; }

}  // namespace
}  // namespace ixt
