// Largest magnitudes of rows, or of a whole tensor: one read of x.
#include <algorithm>

#include "fp8_device.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// A block takes a tile of a row. `tiles` blocks a row meet in its amax, which starts at 0; bits of
// floats that are not negative order like integers. One tile: the block writes the amax.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    amax_tiles(const T* __restrict__ x, float* amax, int64_t cols, int64_t stride, int64_t tiles,
               bool whole) {
  __shared__ float shared[kWarp];
  using In = Raw<N * sizeof(T)>;
  const int64_t row = tiles == 1 ? blockIdx.x : blockIdx.x / tiles;
  const int64_t tile = blockIdx.x - row * tiles;
  const T* start = x + row * stride;
  const int64_t vectors = cols / N;
  const int64_t first = tile * (kThreads * kUnroll) + threadIdx.x;
  Amax<T> best;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kThreads;
    if (at < vectors) add_raw(best, __ldg(reinterpret_cast<const In*>(start) + at));
  }
  if (N > 1 && tile == 0 && threadIdx.x < cols - vectors * N) {
    add_raw(best, reinterpret_cast<const Raw<sizeof(T)>*>(start)[vectors * N + threadIdx.x]);
  }
  const float value = block_max(best.value(), shared);
  if (threadIdx.x != 0) return;
  float* out = amax + (whole ? 0 : row);
  if (tiles == 1 && !whole) {
    *out = value;
    return;
  }
  pdl_wait();  // it is zero
  auto* bits = reinterpret_cast<int*>(out);
  const int mine = __float_as_int(value);
  // The look before the update keeps most blocks off the one address.
  if (mine > *static_cast<volatile int*>(bits)) atomicMax(bits, mine);
}

// A warp takes a short row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    amax_short_rows(const T* __restrict__ x, float* amax, int64_t rows, int64_t cols,
                    int64_t stride) {
  using In = Raw<N * sizeof(T)>;
  const int64_t row = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp;
  if (row >= rows) return;
  const int lane = threadIdx.x % kWarp;
  const T* start = x + row * stride;
  const int vectors = static_cast<int>(cols / N);
  Amax<T> best;
#pragma unroll kUnroll
  for (int i = lane; i < vectors; i += kWarp) {
    add_raw(best, __ldg(reinterpret_cast<const In*>(start) + i));
  }
  if (N > 1 && lane < cols - vectors * N) {
    add_raw(best, reinterpret_cast<const Raw<sizeof(T)>*>(start)[vectors * N + lane]);
  }
  const float value = warp_max(best.value());
  if (lane == 0) amax[row] = value;
}

template <typename T, int N>
void run(const Rows& x, bool whole, float* amax, Target target) {
  const auto* data = static_cast<const T*>(x.tensor.const_data_ptr());
  const int64_t vectors = x.cols / N;
  if (!whole && vectors <= kWarp * kUnroll) {
    constexpr int64_t rows = kThreads / kWarp;
    launch(amax_short_rows<T, N>, (x.rows + rows - 1) / rows, kThreads, target.stream, false,
           data, amax, x.rows, x.cols, x.stride);
    return;
  }
  constexpr int64_t tile = kThreads * kUnroll;
  const int64_t tiles = std::max<int64_t>(1, (vectors + tile - 1) / tile);
  const bool overlap = (whole || tiles > 1) && can_overlap(target.device, amax_tiles<T, N>);
  launch(amax_tiles<T, N>, x.rows * tiles, kThreads, target.stream, overlap, data, amax, x.cols,
         x.stride, tiles, whole);
}

}  // namespace

void launch_amax(const Rows& x, bool whole, float* amax, Float in, Target target) {
  const int64_t results = whole ? 1 : x.rows;
  if (results == 0) return;
  with_type<bf16, f16>(in, [&](auto t) {
    using T = decltype(t);
    constexpr int N = kVector<T>;
    const bool wide = aligned16(x.tensor.const_data_ptr()) &&
                      (x.rows == 1 || x.stride % N == 0);
    const bool shared = whole || x.cols / (wide ? N : 1) > kThreads * kUnroll;
    if (shared || x.cols == 0) {
      launch_clear(amax, results, target);
    }
    if (x.rows == 0 || x.cols == 0) return;
    if (wide) {
      run<T, N>(x, whole, amax, target);
    } else {
      run<T, 1>(x, whole, amax, target);
    }
  });
}

}  // namespace ixt
