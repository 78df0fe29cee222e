// Quantize with one scale a row, in one pass: a row stays in registers between amax and codes.
// `Format` is one of the FP8 formats, or Int8.
//
// A group of lanes takes a short row, a block takes a long one; rows that do not fit in registers
// or are not aligned are read twice, the second time from cache.
#pragma once

#include <algorithm>

#include "fp8_device.cuh"
#include "fp8_launch.h"

namespace ixt {
namespace {

constexpr int kGroupThreads = 256;
constexpr int kMidThreads = 512;
constexpr int kBigThreads = 1024;
constexpr int kMidVectors = 4;  // 16-byte vectors a thread
constexpr int kBigVectors = 8;
constexpr int kLoopBatch = 4;
constexpr int64_t kMaxGrid = 0x7FFFFFFF;

// Scale of the row with this amax, or the given one; thread `first` writes the row's results.
template <typename Format, bool Static>
__device__ __forceinline__ float row_scale(const QuantizeArgs& a, int64_t row, float amax,
                                           bool first) {
  const float scale = Static ? a.scale[row] : scale_from_amax<Format>(amax, a.rule);
  if (first) {
    a.scale_inv[row] = stored_scale<Format>(scale);
    if constexpr (Static) a.amax[row] = amax;
  }
  return scale;
}

// The vectors of one thread: index + i * step of the row, and at most one element of its tail.
template <typename T, int V>
struct RowSlice {
  static constexpr int N = kVector<T>;
  Raw<16> data[V];
  Raw<sizeof(T)> last;
  bool has_last;

  __device__ __forceinline__ void load(const T* x, int cols, int index, int step) {
    const int vectors = cols / N;
    const auto* source = reinterpret_cast<const Raw<16>*>(x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int at = index + i * step;
      data[i] = at < vectors ? source[at] : Raw<16>{0u, 0u, 0u, 0u};
    }
    has_last = index < cols - vectors * N;
    last = 0;
    if (has_last) last = reinterpret_cast<const Raw<sizeof(T)>*>(x)[vectors * N + index];
  }

  __device__ __forceinline__ float amax() const {
    Amax<T> best;
#pragma unroll
    for (int i = 0; i < V; ++i) add_raw(best, data[i]);
    add_raw(best, last);
    return best.value();
  }

  template <typename Format>
  __device__ __forceinline__ void store(uint8_t* q, int cols, int index, int step, float scale) {
    const int vectors = cols / N;
    auto* target = reinterpret_cast<Raw<N>*>(q);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int at = index + i * step;
      if (at < vectors) target[at] = quantize<T, Format, N>(data[i], scale);
    }
    if (has_last) q[vectors * N + index] = quantize<T, Format, 1>(last, scale);
  }
};

// `lanes` (a power of two up to 32) share a row.
template <typename T, typename Format, bool Static, int V>
__global__ void __launch_bounds__(kGroupThreads)
    quantize_rows_group(const __grid_constant__ QuantizeArgs a, int lanes) {
  const int index = threadIdx.x & (lanes - 1);
  const int64_t group = (blockIdx.x * int64_t{kGroupThreads} + threadIdx.x) / lanes;
  const int64_t groups = gridDim.x * int64_t{kGroupThreads} / lanes;
  const int cols = static_cast<int>(a.cols);
  // All lanes of a warp take part in every shuffle, so the loop ends for a warp as a whole.
  const int64_t warp_first = (blockIdx.x * int64_t{kGroupThreads} + (threadIdx.x & ~31)) / lanes;
  for (int64_t base = warp_first; base < a.rows; base += groups) {
    const int64_t row = base + (group - warp_first);
    const bool active = row < a.rows;
    RowSlice<T, V> slice;
    slice.load(static_cast<const T*>(a.x) + (active ? row : 0) * a.stride, active ? cols : 0, index,
               lanes);
    float amax = slice.amax();
    for (int step = lanes / 2; step > 0; step /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    }
    if (!active) continue;
    const float scale = row_scale<Format, Static>(a, row, amax, index == 0);
    slice.template store<Format>(a.q + row * a.cols, cols, index, lanes, scale);
  }
}

template <typename T, typename Format, bool Static, int V>
__device__ __forceinline__ void quantize_row_in_block(const QuantizeArgs& a) {
  __shared__ float shared[kWarp];
  const int64_t row = blockIdx.x;
  const int cols = static_cast<int>(a.cols);
  const int index = threadIdx.x;
  const int step = blockDim.x;
  RowSlice<T, V> slice;
  slice.load(static_cast<const T*>(a.x) + row * a.stride, cols, index, step);
  uint8_t* q = a.q + row * a.cols;
  if constexpr (Static) {  // the codes need not wait for the other threads
    slice.template store<Format>(q, cols, index, step, a.scale[row]);
  }
  const float amax = block_max(slice.amax(), shared);
  if (Static && index != 0) return;
  const float scale = row_scale<Format, Static>(a, row, amax, index == 0);
  if constexpr (!Static) slice.template store<Format>(q, cols, index, step, scale);
}

template <typename T, typename Format, bool Static>
__global__ void __launch_bounds__(kMidThreads, 3)
    quantize_rows_mid(const __grid_constant__ QuantizeArgs a) {
  quantize_row_in_block<T, Format, Static, kMidVectors>(a);
}

template <typename T, typename Format, bool Static>
__global__ void __launch_bounds__(kBigThreads, 1)
    quantize_rows_big(const __grid_constant__ QuantizeArgs a) {
  quantize_row_in_block<T, Format, Static, kBigVectors>(a);
}

// Any row: N elements an access, two passes over the row.
template <typename T, typename Format, bool Static, int N>
__global__ void __launch_bounds__(kMidThreads)
    quantize_rows_loop(const __grid_constant__ QuantizeArgs a) {
  __shared__ float shared[kWarp];
  using In = Raw<N * sizeof(T)>;
  const int64_t vectors = a.cols / N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.stride;
    const auto* source = reinterpret_cast<const In*>(x);
    uint8_t* q = a.q + row * a.cols;
    auto* target = reinterpret_cast<Raw<N>*>(q);
    const int64_t tail = vectors * N + threadIdx.x;
    Amax<T> best;
#pragma unroll kLoopBatch
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) add_raw(best, __ldg(source + i));
    if (N > 1 && tail < a.cols) add_raw(best, reinterpret_cast<const Raw<sizeof(T)>*>(x)[tail]);
    const float amax = block_max(best.value(), shared);
    const float scale = row_scale<Format, Static>(a, row, amax, threadIdx.x == 0);
    for (int64_t i = threadIdx.x; i < vectors; i += kLoopBatch * blockDim.x) {
      In batch[kLoopBatch];  // all loads before the first store
#pragma unroll
      for (int j = 0; j < kLoopBatch; ++j) {
        const int64_t at = i + j * blockDim.x;
        if (at < vectors) batch[j] = __ldg(source + at);
      }
#pragma unroll
      for (int j = 0; j < kLoopBatch; ++j) {
        const int64_t at = i + j * blockDim.x;
        if (at < vectors) target[at] = quantize<T, Format, N>(batch[j], scale);
      }
    }
    if (N > 1 && tail < a.cols) {
      q[tail] = quantize<T, Format, 1>(reinterpret_cast<const Raw<sizeof(T)>*>(x)[tail], scale);
    }
    __syncthreads();  // before the next row reuses `shared`
  }
}

int round_up_to_warp(int64_t n) {
  return static_cast<int>((n + kWarp - 1) / kWarp) * kWarp;
}

template <typename T, typename Format, bool Static>
void launch_group(const QuantizeArgs& a, int64_t vectors, bool tail, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < kWarp && (tail || lanes < vectors)) lanes *= 2;
  const int64_t per_block = kGroupThreads / lanes;
  const int64_t blocks = std::min((a.rows + per_block - 1) / per_block, kMaxGrid);
  const auto kernel = vectors <= kWarp ? quantize_rows_group<T, Format, Static, 1>
                                       : quantize_rows_group<T, Format, Static, 4>;
  launch(kernel, blocks, kGroupThreads, stream, false, a, lanes);
}

template <typename T, typename Format, bool Static>
void launch_rows(const QuantizeArgs& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const int64_t vectors = a.cols / N;
  const bool tail = a.cols % N != 0;
  const bool aligned = aligned_rows(a, N);
  const int64_t grid = std::min(a.rows, kMaxGrid);
  if (!aligned) {
    const int threads = a.cols <= 1024 ? kWarp : kMidThreads;
    launch(quantize_rows_loop<T, Format, Static, 1>, grid, threads, stream, false, a);
  } else if (vectors <= 4 * kWarp) {
    launch_group<T, Format, Static>(a, vectors, tail, stream);
  } else if (vectors <= kMidVectors * kMidThreads) {
    const int threads = round_up_to_warp((vectors + kMidVectors - 1) / kMidVectors);
    launch(quantize_rows_mid<T, Format, Static>, grid, threads, stream, false, a);
  } else if (vectors <= kBigVectors * kBigThreads) {
    const int threads = round_up_to_warp((vectors + kBigVectors - 1) / kBigVectors);
    launch(quantize_rows_big<T, Format, Static>, grid, threads, stream, false, a);
  } else {
    launch(quantize_rows_loop<T, Format, Static, N>, grid, kMidThreads, stream, false, a);
  }
}

}  // namespace
}  // namespace ixt
