// Quantize with one scale for the tensor, or a scale for each of a few long rows; and dequantize:
// streams over contiguous memory. blockIdx.y is the row; a tensor is one. `Format` is one of the FP8
// formats, or Int8.
//
// A block takes one tile and ends: on an H200, grids of many short blocks with the default cache
// policy reach 96 to 99 % of a copy's bandwidth, where a grid that fills the GPU once and loops
// reached 84, and streaming hints (ld.cs, L1::no_allocate) cost 6 to 8 %.
#pragma once

#include "fp8_device.cuh"
#include "fp8_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kQuantizeUnroll = 4;  // vectors a thread: independent loads in flight
constexpr int kDequantizeUnroll = 2;

// Where the vectors of a row are, for a thread that takes one in kThreads: one after the other,
struct Whole {
  using Place = int64_t;
  int64_t stride;

  __device__ __forceinline__ int64_t start(unsigned row) const { return row * stride; }
  __device__ __forceinline__ Place place(int64_t number) const { return number; }
  __device__ __forceinline__ void advance(Place& place) const { place += kThreads; }
  __device__ __forceinline__ int64_t vector(Place place) const { return place; }
};

// or in pieces, as QuantizeArgs describes them, counted in vectors. A thread divides once.
struct InPieces {
  struct Place {
    uint32_t piece;
    uint32_t within;
  };
  int64_t stride;
  int64_t group_stride;
  int64_t piece_stride;
  uint32_t group;
  uint32_t piece;
  Place step;  // of kThreads vectors

  InPieces(const QuantizeArgs& a, int vector)
      : stride(a.stride), group_stride(a.pieces.group_stride),
        piece_stride(a.pieces.stride / vector), group(static_cast<uint32_t>(a.pieces.group)),
        piece(static_cast<uint32_t>(a.pieces.length / vector)),
        step{kThreads / piece, kThreads % piece} {}

  __device__ __forceinline__ int64_t start(unsigned row) const {
    return row / group * group_stride + row % group * stride;
  }
  __device__ __forceinline__ Place place(int64_t number) const {
    const uint32_t narrow = static_cast<uint32_t>(number);
    return {narrow / piece, narrow % piece};
  }
  __device__ __forceinline__ void advance(Place& place) const {
    place.piece += step.piece;
    place.within += step.within;
    if (place.within < piece) return;
    place.within -= piece;
    ++place.piece;
  }
  __device__ __forceinline__ int64_t vector(Place place) const {
    return place.piece * piece_stride + place.within;
  }
};

// The vectors of this thread: N elements each, `count` in the tensor, U a thread.
template <typename T, int N, int U>
struct Slice {
  using In = Raw<N * sizeof(T)>;
  int64_t first;
  In data[U];

  // Missing vectors read as zeros, which change no amax.
  template <typename Where = Whole>
  __device__ __forceinline__ void load(const T* __restrict__ x, int64_t tile, int64_t count,
                                       const Where& where = Where{}) {
    first = tile * (kThreads * U) + threadIdx.x;
    const auto* source = reinterpret_cast<const In*>(x);
    auto place = where.place(first);
#pragma unroll
    for (int i = 0; i < U; ++i) {
      data[i] = In{};
      if (first + i * kThreads < count) data[i] = __ldg(source + where.vector(place));
      where.advance(place);
    }
  }

  __device__ __forceinline__ void add_to(Amax<T>& best) const {
#pragma unroll
    for (int i = 0; i < U; ++i) add_raw(best, data[i]);
  }

  // f(vector) -> what is stored at the same place of y.
  template <typename Out, typename F>
  __device__ __forceinline__ void store(Out* __restrict__ y, int64_t count, const F& f) const {
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const int64_t at = first + i * kThreads;
      if (at < count) y[at] = f(data[i], at);
    }
  }
};

// The elements behind the last whole vector belong to the first threads of a row's block 0.
template <int N>
__device__ __forceinline__ bool tail_element(int64_t n, int64_t* at) {
  *at = n / N * N + threadIdx.x;
  return N > 1 && blockIdx.x == 0 && *at < n;
}

template <typename T>
__device__ __forceinline__ Raw<sizeof(T)> raw_at(const T* x, int64_t at) {
  return reinterpret_cast<const Raw<sizeof(T)>*>(x)[at];
}

// Max over all blocks, in `amax`, which launch_clear makes 0. Bits of floats that are not negative
// order like integers. The look before the update keeps most blocks off the one address. Every block
// waits for launch_clear, so that this kernel does not end before that one.
template <typename T>
__device__ __forceinline__ void raise_amax(float* amax, const Amax<T>& best) {
  __shared__ float shared[kWarp];
  const int value = __float_as_int(block_max(best.value(), shared));
  auto* target = reinterpret_cast<int*>(amax);
  if (threadIdx.x != 0) return;
  pdl_wait();
  if (value > *static_cast<volatile int*>(target)) atomicMax(target, value);
}

// ------------------------------------------------------------------------------- given scale

template <typename T, typename Format, int N>
__global__ void __launch_bounds__(kThreads)
    quantize_static(const T* __restrict__ x, uint8_t* __restrict__ q, const float* scale_ptr,
                    float* scale_inv, float* amax, int64_t n, const __grid_constant__ Whole where) {
  const int64_t row = blockIdx.y;
  x += where.start(blockIdx.y);
  q += row * n;
  const float scale = scale_ptr[row];
  const int64_t vectors = n / N;
  Amax<T> best;
  Slice<T, N, kQuantizeUnroll> slice;
  slice.load(x, blockIdx.x, vectors);
  slice.add_to(best);
  slice.store(reinterpret_cast<Raw<N>*>(q), vectors,
              [&](const auto& raw, int64_t) { return quantize<T, Format, N>(raw, scale); });
  int64_t at;
  if (tail_element<N>(n, &at)) {
    add_raw(best, raw_at(x, at));
    q[at] = quantize<T, Format, 1>(raw_at(x, at), scale);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) scale_inv[row] = stored_scale<Format>(scale);
  raise_amax(amax + row, best);
}

// ------------------------------------------------------------------------------ current scale

template <typename T, int N, typename Where>
__global__ void __launch_bounds__(kThreads)
    amax_flat(const T* __restrict__ x, float* amax, int64_t n,
              const __grid_constant__ Where where) {
  pdl_trigger();
  x += where.start(blockIdx.y);
  Amax<T> best;
  Slice<T, N, kQuantizeUnroll> slice;
  slice.load(x, blockIdx.x, n / N, where);
  slice.add_to(best);
  int64_t at;
  if (tail_element<N>(n, &at)) add_raw(best, raw_at(x, at));
  raise_amax(amax + blockIdx.y, best);
}

// Walks backwards, since the end of x is what amax_flat left in the L2 cache.
template <typename T, typename Format, int N, typename Where>
__global__ void __launch_bounds__(kThreads)
    quantize_current(const T* __restrict__ x, uint8_t* __restrict__ q, const float* amax,
                     float* scale_inv, int64_t n, const __grid_constant__ Where where,
                     const __grid_constant__ ScaleRule rule) {
  const unsigned row = gridDim.y - 1 - blockIdx.y;
  x += where.start(row);
  q += row * n;
  const int64_t vectors = n / N;
  Slice<T, N, kQuantizeUnroll> slice;
  slice.load(x, gridDim.x - 1 - blockIdx.x, vectors, where);
  pdl_wait();  // amax_flat has ended; its x needed no wait
  const float scale = scale_from_amax<Format>(__ldcg(amax + row), rule);
  if (blockIdx.x == 0 && threadIdx.x == 0) scale_inv[row] = stored_scale<Format>(scale);
  slice.store(reinterpret_cast<Raw<N>*>(q), vectors,
              [&](const auto& raw, int64_t) { return quantize<T, Format, N>(raw, scale); });
  int64_t at;
  if (tail_element<N>(n, &at)) q[at] = quantize<T, Format, 1>(raw_at(x, at), scale);
}

// --------------------------------------------------------------------------------- dequantize

// `cols` elements share a scale; Rows = false: all of them share one.
template <typename T, typename Format, int N, bool Rows>
__global__ void __launch_bounds__(kThreads)
    dequantize_flat(const uint8_t* __restrict__ q, const float* __restrict__ scale_inv,
                    T* __restrict__ y, int64_t n, int64_t cols) {
  const int64_t vectors = n / N;
  const int64_t row_vectors = cols / N;
  const bool narrow = vectors <= 0xFFFFFFFFll;  // 32-bit division is several times cheaper
  const float whole = Rows ? 0.0f : *scale_inv;
  const auto scale_at = [&](int64_t at) {
    if constexpr (!Rows) return whole;
    const int64_t row = narrow ? static_cast<uint32_t>(at) / static_cast<uint32_t>(row_vectors)
                               : at / row_vectors;
    return __ldg(scale_inv + row);
  };
  Slice<uint8_t, N, kDequantizeUnroll> slice;
  slice.load(q, blockIdx.x, vectors);
  slice.store(reinterpret_cast<Raw<N * sizeof(T)>*>(y), vectors, [&](const auto& raw, int64_t at) {
    return dequantize<T, Format, N>(raw, scale_at(at));
  });
  int64_t at;
  if (tail_element<N>(n, &at)) {  // N > 1 has a tail only where all elements share a scale
    reinterpret_cast<Raw<sizeof(T)>*>(y)[at] = dequantize<T, Format, 1>(q[at], whole);
  }
}

// --------------------------------------------------------------------------------------- host

int64_t grid_for(int64_t vectors, int unroll) {
  const int64_t tile = int64_t{kThreads} * unroll;
  return vectors <= tile ? 1 : (vectors + tile - 1) / tile;
}

template <typename T, typename Format, int N>
void run_static(const QuantizeArgs& a, Target target) {
  auto* kernel = quantize_static<T, Format, N>;
  const Grid grid(grid_for(a.cols / N, kQuantizeUnroll), a.rows);
  launch_clear(a.amax, a.rows, target);
  launch(kernel, grid, kThreads, target.stream, can_overlap(target.device, kernel),
         static_cast<const T*>(a.x), a.q, a.scale, a.scale_inv, a.amax, a.cols, Whole{a.stride});
}

template <typename T, typename Format, int N, typename Where>
void run_current(const QuantizeArgs& a, const Where& where, Target target) {
  const T* x = static_cast<const T*>(a.x);
  const Grid grid(grid_for(a.cols / N, kQuantizeUnroll), a.rows);
  const bool overlap = can_overlap(target.device, &amax_flat<T, N, Where>);
  launch_clear(a.amax, a.rows, target);
  launch(amax_flat<T, N, Where>, grid, kThreads, target.stream, overlap, x, a.amax, a.cols, where);
  launch(quantize_current<T, Format, N, Where>, grid, kThreads, target.stream, overlap, x, a.q,
         a.amax, a.scale_inv, a.cols, where, a.rule);
}

template <typename T, typename Format, int N, bool Rows>
void run_dequantize(const uint8_t* q, const float* scale_inv, void* y, int64_t n, int64_t cols,
                    Target target) {
  launch(dequantize_flat<T, Format, N, Rows>, grid_for(n / N, kDequantizeUnroll), kThreads,
         target.stream, false, q, scale_inv, static_cast<T*>(y), n, cols);
}

}  // namespace
}  // namespace ixt
