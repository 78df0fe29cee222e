// INT4 and INT8 codes with a scale a group, back to floats.
#include <algorithm>

#include "int_device.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // elements a thread takes of rows that end within a group

// A thread takes a vector of either half of a group, so that both have one scale. A half has
// `1 << shift` vectors; the codes of a vector begin at nibble 0.
template <typename T, bool Symmetric>
__global__ void __launch_bounds__(kThreads)
    dequantize_int4(const uint8_t* __restrict__ q, const float* __restrict__ scales,
                    const uint8_t* __restrict__ zeros, T* __restrict__ y, int64_t vectors,
                    int shift) {
  constexpr int N = kVector<T>;
  constexpr int per_word = sizeof(T) == 4 ? 1 : 2;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t group = thread >> shift;
  const int64_t half = int64_t{1} << shift;
  const int64_t first = thread + group * half;
  if (first >= vectors) return;
  uint32_t codes[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    codes[u] = __ldg(reinterpret_cast<const Raw<N / 2>*>(q) + first + u * half);
  }
  const float scale = __ldg(scales + group);
  // The integer sits in the mantissa of 2^23.
  const float offset = __uint_as_float(0x4B000000u | (Symmetric ? 8u : __ldg(zeros + group)));
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    // Two's complement: flip the sign bit, then take its weight away.
    const uint32_t word = Symmetric ? codes[u] ^ 0x88888888u : codes[u];
    float v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t nibble = (word >> (4 * i)) & 15u;
      v[i] = __fmul_rn(__fsub_rn(__uint_as_float(nibble | 0x4B000000u), offset), scale);
    }
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = pack_pair<T>(v[per_word * i], v[per_word * i + per_word - 1]);
    }
    Raw<16> raw;
    memcpy(&raw, out, 16);
    reinterpret_cast<Raw<16>*>(y)[first + u * half] = raw;
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
    int shift = 0;
    while (2 * N << shift < group) ++shift;
    const auto kernel = zero ? dequantize_int4<T, false> : dequantize_int4<T, true>;
    launch(kernel, (n / (2 * N) + kThreads - 1) / kThreads, kThreads, target.stream, false, q,
           scale, zero, static_cast<T*>(y), n / N, shift);
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
