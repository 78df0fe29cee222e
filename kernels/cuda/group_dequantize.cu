// INT4 and INT8 codes with a scale a group, back to floats.
#include <algorithm>

#include "int_device.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// The codes of a 16-byte vector of floats, N of them, begin at nibble 0.
template <typename T>
__device__ __forceinline__ uint32_t load_codes(const uint8_t* __restrict__ q, int64_t at,
                                               bool aligned) {
  constexpr int bytes = kVector<T> / 2;
  if (aligned) return __ldg(reinterpret_cast<const Raw<bytes>*>(q) + at);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < bytes; ++i) codes |= static_cast<uint32_t>(q[bytes * at + i]) << (8 * i);
  return codes;
}

// `1 << shift` vectors a group.
template <typename T, bool Symmetric>
__global__ void __launch_bounds__(kThreads)
    dequantize_int4(const uint8_t* __restrict__ q, const float* __restrict__ scale,
                    const uint8_t* __restrict__ zero, T* __restrict__ y, int64_t vectors,
                    int shift, bool aligned) {
  constexpr int N = kVector<T>;
  constexpr int per_word = sizeof(T) == 4 ? 1 : 2;
  const int64_t first = blockIdx.x * int64_t{kThreads * kUnroll} + threadIdx.x;
  uint32_t codes[kUnroll];
  float scales[kUnroll];
  float offsets[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kThreads;
    if (at >= vectors) continue;
    codes[u] = load_codes<T>(q, at, aligned);
    scales[u] = __ldg(scale + (at >> shift));
    // The integer sits in the mantissa of 2^23.
    offsets[u] = 8388608.0f + (Symmetric ? 8.0f : static_cast<float>(__ldg(zero + (at >> shift))));
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kThreads;
    if (at >= vectors) continue;
    // Two's complement: flip the sign bit, then take its weight away.
    const uint32_t word = Symmetric ? codes[u] ^ 0x88888888u : codes[u];
    float v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t nibble = (word >> (4 * i)) & 15u;
      const float number = __fsub_rn(__uint_as_float(nibble | 0x4B000000u), offsets[u]);
      v[i] = __fmul_rn(number, scales[u]);
    }
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = pack_pair<T>(v[per_word * i], v[per_word * i + per_word - 1]);
    }
    Raw<16> raw;
    memcpy(&raw, out, 16);
    reinterpret_cast<Raw<16>*>(y)[at] = raw;
  }
}

// INT8 rows that end within a group, or begin at any address. `tiles` blocks a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_ragged(const uint8_t* __restrict__ q, const float* __restrict__ scale,
                      T* __restrict__ y, int64_t cols, int group, int64_t tiles) {
  const int64_t row = blockIdx.x / tiles;
  const int64_t per_row = (cols + group - 1) / group;
  const int64_t first = (blockIdx.x - row * tiles) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t k = first + u * kThreads;
    if (k >= cols) continue;
    const float s = __ldg(scale + row * per_row + k / group);
    const int64_t at = row * cols + k;
    reinterpret_cast<Raw<sizeof(T)>*>(y)[at] = dequantize<T, Int8, 1>(q[at], s);
  }
}

}  // namespace

void launch_dequantize_int4(const uint8_t* q, const float* scale, const uint8_t* zero, void* y,
                            int64_t n, int group, Float out, Target target) {
  if (n == 0) return;
  with_type<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    constexpr int N = kVector<T>;
    constexpr int64_t tile = kThreads * kUnroll;
    const int64_t vectors = n / N;
    int shift = 0;
    while (N << shift < group) ++shift;
    const auto kernel = zero ? dequantize_int4<T, false> : dequantize_int4<T, true>;
    launch(kernel, (vectors + tile - 1) / tile, kThreads, target.stream, false, q, scale, zero,
           static_cast<T*>(y), vectors, shift, reinterpret_cast<uintptr_t>(q) % (N / 2) == 0);
  });
}

void launch_dequantize_int8_groups(const uint8_t* q, const float* scale, void* y, int64_t rows,
                                   int64_t cols, int group, Float out, Target target) {
  if (rows == 0 || cols == 0) return;
  if (cols % group == 0) {  // then the groups are those of one long row
    launch_dequantize_int8(q, scale, y, rows * cols, group, out, target);
    return;
  }
  constexpr int64_t tile = kThreads * kUnroll;
  const int64_t tiles = (cols + tile - 1) / tile;
  with_type<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    launch(dequantize_ragged<T>, rows * tiles, kThreads, target.stream, false, q, scale,
           static_cast<T*>(y), cols, group, tiles);
  });
}

}  // namespace ixt
