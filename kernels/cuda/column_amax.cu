// The amax of every column: the first of the two passes of FP8 with a scale a column.
#include <algorithm>

#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpCols = kWarp * kPatch;
constexpr int kSteps = 4;  // patches of a thread, one below the other
constexpr int kBlockRows = kWarps * kPatch * kSteps;

// A block takes 256 rows x 256 columns. Bits of floats that are not negative order like integers.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_columns(const T* __restrict__ x, int64_t rows, int64_t cols, int64_t stride,
                 float* __restrict__ amax, uint32_t tiles_k, bool wide) {
  __shared__ int best[kWarpCols];
  const uint32_t tile_m = blockIdx.x / tiles_k;
  const uint32_t tile_k = blockIdx.x - tile_m * tiles_k;
  const int lane = threadIdx.x % kWarp;
  const int64_t col = int64_t{tile_k} * kWarpCols + lane * kPatch;
  const int64_t row = int64_t{tile_m} * kBlockRows + threadIdx.x / kWarp * kPatch;
  const int cols_left = static_cast<int>(min(cols - col, int64_t{kPatch}));
  best[threadIdx.x] = 0;
  uint32_t column[Patch<T>::W] = {};
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const int64_t at = row + step * kWarps * kPatch;
    Patch<T> patch;
    patch.load(x + at * stride + col, stride,
               static_cast<int>(min(rows - at, int64_t{kPatch})), cols_left, wide);
#pragma unroll
    for (int w = 0; w < Patch<T>::W; ++w) {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) column[w] = max_magnitude<T>(column[w], patch.word[i][w]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < Patch<T>::W; ++w) {
    const float2 pair = magnitudes<T>(column[w]);
    constexpr int per_word = 4 / sizeof(T);
    atomicMax(&best[lane * kPatch + w * per_word], __float_as_int(pair.x));
    if (per_word == 2) atomicMax(&best[lane * kPatch + 2 * w + 1], __float_as_int(pair.y));
  }
  __syncthreads();
  const int64_t mine = int64_t{tile_k} * kWarpCols + threadIdx.x;
  pdl_wait();  // it is zero
  if (mine < cols) atomicMax(reinterpret_cast<int*>(amax) + mine, best[threadIdx.x]);
}

template <typename T>
void launch_columns(const void* x, int64_t rows, int64_t cols, int64_t stride, float* amax,
                    Target target) {
  const int64_t tiles_m = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t tiles_k = (cols + kWarpCols - 1) / kWarpCols;
  IXT_CHECK(tiles_m * tiles_k <= 0x7FFFFFFF, "`x` must have at most 2**45 elements, got ",
            rows * cols);
  const bool wide =
      aligned16(x) && (stride * sizeof(T) % 16 == 0 || rows <= 1) && cols % kPatch == 0;
  launch(amax_columns<T>, tiles_m * tiles_k, kThreads, target.stream,
         can_overlap(target.device, amax_columns<T>), static_cast<const T*>(x), rows, cols, stride,
         amax, tiles_k, wide);
}

}  // namespace

void launch_column_amax(const void* x, int64_t rows, int64_t cols, int64_t stride, float* amax,
                        Float in, Target target) {
  if (cols == 0) return;
  launch_clear(amax, cols, target);
  if (rows == 0) return;
  if (in == Float::bf16) {
    launch_columns<bf16>(x, rows, cols, stride, amax, target);
  } else if (in == Float::f16) {
    launch_columns<f16>(x, rows, cols, stride, amax, target);
  } else {
    launch_columns<float>(x, rows, cols, stride, amax, target);
  }
}

}  // namespace ixt
