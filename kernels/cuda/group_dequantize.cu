// INT4 and INT8 codes with a scale a group, back to floats.
#include <algorithm>

#include "int_device.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;
constexpr int kUnroll = 4;

template <typename T>
__device__ __forceinline__ void store_eight(T* y, const float (&v)[kChunk]) {
  constexpr int W = kChunk * sizeof(T) / 4;
  uint32_t words[W];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    words[i] = sizeof(T) == 4 ? __float_as_uint(v[i]) : pack_pair<T>(v[2 * i % 8], v[(2 * i + 1) % 8]);
  }
#pragma unroll
  for (int part = 0; part < W / 4; ++part) {
    Raw<16> raw;
    memcpy(&raw, words + 4 * part, 16);
    reinterpret_cast<Raw<16>*>(y)[part] = raw;
  }
}

// Eight elements a chunk, `1 << shift` chunks a group.
template <typename T, bool Symmetric>
__global__ void __launch_bounds__(kThreads)
    dequantize_int4(const uint8_t* __restrict__ q, const float* __restrict__ scale,
                    const uint8_t* __restrict__ zero, T* __restrict__ y, int64_t chunks, int shift,
                    bool aligned) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kUnroll} + threadIdx.x;
  uint32_t codes[kUnroll];
  float scales[kUnroll];
  float offsets[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = first + u * kThreads;
    if (chunk >= chunks) continue;
    if (aligned) {
      codes[u] = __ldg(reinterpret_cast<const uint32_t*>(q) + chunk);
    } else {
      const uint8_t* p = q + 4 * chunk;
      codes[u] = p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
    }
    scales[u] = __ldg(scale + (chunk >> shift));
    // The integer sits in the mantissa of 2^23.
    offsets[u] = 8388608.0f + (Symmetric ? 8.0f : static_cast<float>(__ldg(zero + (chunk >> shift))));
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = first + u * kThreads;
    if (chunk >= chunks) continue;
    // Two's complement: flip the sign bit, then take its weight away.
    const uint32_t word = Symmetric ? codes[u] ^ 0x88888888u : codes[u];
    float v[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t nibble = (word >> (4 * i)) & 15u;
      const float number = __fsub_rn(__uint_as_float(nibble | 0x4B000000u), offsets[u]);
      v[i] = __fmul_rn(number, scales[u]);
    }
    store_eight(y + kChunk * chunk, v);
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
  const int64_t chunks = n / kChunk;
  constexpr int64_t tile = kThreads * kUnroll;
  int shift = 0;
  while (kChunk << shift < group) ++shift;
  with_type<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    const auto kernel = zero ? dequantize_int4<T, false> : dequantize_int4<T, true>;
    launch(kernel, (chunks + tile - 1) / tile, kThreads, target.stream, false, q, scale, zero,
           static_cast<T*>(y), chunks, shift, reinterpret_cast<uintptr_t>(q) % 4 == 0);
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
