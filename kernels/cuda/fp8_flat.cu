// FP8 quantize with one scale for the tensor, and dequantize: streams over contiguous memory.
//
// Every kernel is a grid that fills the GPU once and walks tiles of kThreads * kUnroll vectors,
// block after block, so that at any time the whole grid works in one window of memory.
#include <algorithm>

#include "fp8_device.cuh"
#include "fp8_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;       // independent loads in flight in a thread
constexpr int kBlocksPerSm = 6;  // 1536 threads: leaves 40 registers a thread

// The vectors of one thread in one tile. N elements a vector; the tensor has `count` vectors.
template <typename T, int N>
struct TileSlice {
  using In = Raw<N * sizeof(T)>;
  In data[kUnroll];

  // Missing vectors read as zeros, which change no amax.
  template <bool Stream>
  __device__ __forceinline__ void load(const T* x, int64_t tile, int64_t count) {
    const int64_t first = tile * (kThreads * kUnroll) + threadIdx.x;
    const auto* source = reinterpret_cast<const In*>(x) + first;
    if ((tile + 1) * (kThreads * kUnroll) <= count) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) data[i] = read<Stream>(source + i * kThreads);
    } else {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        data[i] = In{};
        if (first + i * kThreads < count) data[i] = read<Stream>(source + i * kThreads);
      }
    }
  }

  __device__ __forceinline__ void add_to(Amax<T>& best) const {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) add_raw(best, data[i]);
  }

  template <typename Format, bool Stream>
  __device__ __forceinline__ void store(uint8_t* q, int64_t tile, int64_t count,
                                        float scale) const {
    const int64_t first = tile * (kThreads * kUnroll) + threadIdx.x;
    auto* target = reinterpret_cast<Raw<N>*>(q) + first;
    const bool full = (tile + 1) * (kThreads * kUnroll) <= count;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (full || first + i * kThreads < count) {
        const Raw<N> codes = quantize<T, Format, N>(data[i], scale);
        if constexpr (Stream) {
          __stcs(target + i * kThreads, codes);
        } else {
          target[i * kThreads] = codes;
        }
      }
    }
  }

 private:
  template <bool Stream>
  static __device__ __forceinline__ In read(const In* p) {
    if constexpr (Stream) {
      return __ldcs(p);  // not needed again: first to leave the cache
    } else {
      return __ldg(p);
    }
  }
};

__device__ __host__ __forceinline__ int64_t tile_count(int64_t vectors) {
  return (vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll);
}

// The elements behind the last whole vector belong to the first threads of block 0.
template <typename T, int N>
__device__ __forceinline__ bool tail_element(int64_t n, int64_t* at) {
  *at = n / N * N + threadIdx.x;
  return N > 1 && blockIdx.x == 0 && *at < n;
}

template <typename T>
__device__ __forceinline__ Raw<sizeof(T)> raw_at(const T* x, int64_t at) {
  return reinterpret_cast<const Raw<sizeof(T)>*>(x)[at];
}

// ------------------------------------------------------------------------------- given scale

// amax starts at 0 because the blocks of the next kernel meet there in atomicMax.
__global__ void static_begin(const float* scale, float* scale_inv, float* amax) {
  pdl_trigger();
  *scale_inv = __fdiv_rn(1.0f, *scale);
  *amax = 0.0f;
}

template <typename T, typename Format, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantize_static(const T* __restrict__ x, uint8_t* __restrict__ q, const float* scale_ptr,
                    float* amax, int64_t n) {
  __shared__ float shared[kWarp];
  const float scale = *scale_ptr;
  const int64_t vectors = n / N;
  const int64_t tiles = tile_count(vectors);
  Amax<T> best;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    TileSlice<T, N> slice;
    slice.template load<true>(x, tile, vectors);
    slice.add_to(best);
    slice.template store<Format, false>(q, tile, vectors, scale);
  }
  int64_t at;
  if (tail_element<T, N>(n, &at)) {
    add_raw(best, raw_at(x, at));
    q[at] = quantize<T, Format, 1>(raw_at(x, at), scale);
  }
  const float value = block_max(best.value(), shared);
  pdl_wait();  // static_begin has written its zero
  // Bits of floats that are not negative order like integers.
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

// ------------------------------------------------------------------------------ current scale

// Tiles from `keep` on are read with the default cache policy, so that the end of the tensor is
// still in L2 when quantize_current starts there.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    amax_partial(const T* __restrict__ x, float* __restrict__ partial, int64_t n, int64_t keep) {
  __shared__ float shared[kWarp];
  pdl_trigger();
  const int64_t vectors = n / N;
  const int64_t tiles = tile_count(vectors);
  Amax<T> best;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    TileSlice<T, N> slice;
    if (tile < keep) {
      slice.template load<true>(x, tile, vectors);
    } else {
      slice.template load<false>(x, tile, vectors);
    }
    slice.add_to(best);
  }
  int64_t at;
  if (tail_element<T, N>(n, &at)) add_raw(best, raw_at(x, at));
  const float value = block_max(best.value(), shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
}

template <typename T, typename Format, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantize_current(const T* __restrict__ x, uint8_t* __restrict__ q, const float* partial,
                     int partials, float* scale_inv, int64_t n, ScaleRule rule) {
  __shared__ float shared[kWarp];
  const int64_t vectors = n / N;
  int64_t tile = tile_count(vectors) - 1 - blockIdx.x;  // last tiles first
  TileSlice<T, N> slice;
  if (tile >= 0) slice.template load<true>(x, tile, vectors);
  pdl_wait();  // amax_partial has ended; its x needed no wait
  float amax = 0.0f;
  for (int i = threadIdx.x; i < partials; i += kThreads) amax = fmaxf(amax, __ldcg(partial + i));
  const float scale = scale_from_amax<Format>(block_max(amax, shared), rule);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = __fdiv_rn(1.0f, scale);
  while (tile >= 0) {
    slice.template store<Format, true>(q, tile, vectors, scale);
    tile -= gridDim.x;
    if (tile >= 0) slice.template load<true>(x, tile, vectors);
  }
  int64_t at;
  if (tail_element<T, N>(n, &at)) q[at] = quantize<T, Format, 1>(raw_at(x, at), scale);
}

// --------------------------------------------------------------------------------- dequantize

// `cols` elements share a scale; Rows = false: all of them share one.
template <typename T, typename Format, int N, bool Rows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dequantize_flat(const uint8_t* __restrict__ q, const float* __restrict__ scale_inv,
                    T* __restrict__ y, int64_t n, int64_t cols) {
  using Out = Raw<N * sizeof(T)>;
  const auto* source = reinterpret_cast<const Raw<N>*>(q);
  auto* target = reinterpret_cast<Out*>(y);
  const int64_t vectors = n / N;
  const int64_t tiles = tile_count(vectors);
  const int64_t row_vectors = cols / N;
  const bool narrow = vectors <= 0xFFFFFFFFll;  // 32-bit division is several times cheaper
  float scale = Rows ? 0.0f : *scale_inv;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile * (kThreads * kUnroll) + threadIdx.x;
    Raw<N> codes[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads < vectors) codes[i] = __ldcs(source + first + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t at = first + i * kThreads;
      if (at >= vectors) break;
      if constexpr (Rows) {
        const int64_t row = narrow ? static_cast<uint32_t>(at) / static_cast<uint32_t>(row_vectors)
                                   : at / row_vectors;
        scale = __ldg(scale_inv + row);
      }
      target[at] = dequantize<T, Format, N>(codes[i], scale);
    }
  }
  int64_t at;
  if (tail_element<T, N>(n, &at)) {
    if constexpr (Rows) scale = scale_inv[at / cols];
    reinterpret_cast<Raw<sizeof(T)>*>(y)[at] = dequantize<T, Format, 1>(q[at], scale);
  }
}

// --------------------------------------------------------------------------------------- host

const DeviceInfo& info_of(int device) { return device_info(device, &static_begin); }

int64_t grid_for(int64_t vectors, const DeviceInfo& info) {
  const int64_t fill = static_cast<int64_t>(info.sms) * kBlocksPerSm;
  return std::max<int64_t>(1, std::min(tile_count(vectors), fill));
}

template <typename T, typename Format, int N>
void run_static(const QuantizeArgs& a, Target target) {
  const DeviceInfo& info = info_of(target.device);
  const T* x = static_cast<const T*>(a.x);
  launch(static_begin, 1, 1, target.stream, false, a.scale, a.scale_inv, a.amax);
  launch(quantize_static<T, Format, N>, grid_for(a.cols / N, info), kThreads, target.stream,
         info.pdl, x, a.q, a.scale, a.amax, a.cols);
}

template <typename T, typename Format, int N>
void run_current(const QuantizeArgs& a, float* partial, Target target) {
  const DeviceInfo& info = info_of(target.device);
  const T* x = static_cast<const T*>(a.x);
  const int64_t vectors = a.cols / N;
  const int64_t grid = grid_for(vectors, info);
  const int64_t tile_bytes = int64_t{kThreads} * kUnroll * N * sizeof(T);
  const int64_t keep = std::max<int64_t>(0, tile_count(vectors) - info.l2_bytes / 2 / tile_bytes);
  launch(amax_partial<T, N>, grid, kThreads, target.stream, false, x, partial, a.cols, keep);
  launch(quantize_current<T, Format, N>, grid, kThreads, target.stream, info.pdl, x, a.q, partial,
         static_cast<int>(grid), a.scale_inv, a.cols, a.rule);
}

template <typename T, typename Format, int N, bool Rows>
void run_dequantize(const uint8_t* q, const float* scale_inv, void* y, int64_t n, int64_t cols,
                    Target target) {
  launch(dequantize_flat<T, Format, N, Rows>, grid_for(n / N, info_of(target.device)), kThreads,
         target.stream, false, q, scale_inv, static_cast<T*>(y), n, cols);
}

}  // namespace

void launch_quantize_static(const QuantizeArgs& args, Float in, Fp8 out, Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (aligned16(args.x)) {
      run_static<T, Format, kVector<T>>(args, target);
    } else {
      run_static<T, Format, 1>(args, target);
    }
  });
}

int64_t current_partial_count(int device) {
  return static_cast<int64_t>(info_of(device).sms) * kBlocksPerSm;
}

void launch_quantize_current(const QuantizeArgs& args, float* partial, Float in, Fp8 out,
                             Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (aligned16(args.x)) {
      run_current<T, Format, kVector<T>>(args, partial, target);
    } else {
      run_current<T, Format, 1>(args, partial, target);
    }
  });
}

void launch_dequantize(const uint8_t* q, const float* scale_inv, void* y, int64_t n, int64_t cols,
                       Fp8 in, Float out, Target target) {
  if (n == 0) return;
  with_types<bf16, f16>(out, in, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    constexpr int N = kVector<T>;
    const bool whole = cols == n;
    const bool wide = reinterpret_cast<uintptr_t>(q) % N == 0 && (whole || cols % N == 0);
    if (whole) {
      wide ? run_dequantize<T, Format, N, false>(q, scale_inv, y, n, cols, target)
           : run_dequantize<T, Format, 1, false>(q, scale_inv, y, n, cols, target);
    } else {
      wide ? run_dequantize<T, Format, N, true>(q, scale_inv, y, n, cols, target)
           : run_dequantize<T, Format, 1, true>(q, scale_inv, y, n, cols, target);
    }
  });
}

}  // namespace ixt
