// Sums over rows without atomics: a thread's columns in registers, then the blocks' in order.
#pragma once

#include "floats.cuh"

namespace ixt {
namespace {

// The sums of one thread's columns, in registers (Held packs) or, Held = 0, in the block's line.
template <int N, int Held>
class ColumnSums {
 public:
  // `first`: nothing is in the line yet.
  __device__ __forceinline__ void add(int i, float* line, int64_t at, int64_t cols, bool first,
                                      const float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Held > 0) {
        held_[i][j] += v[j];
      } else if (at + j < cols) {
        line[at + j] = first ? v[j] : line[at + j] + v[j];
      }
    }
  }

  __device__ __forceinline__ void finish(float* line, int64_t cols) const {
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        const int64_t at = (int64_t{i} * blockDim.x + threadIdx.x) * N;
#pragma unroll
        for (int j = 0; j < N; j += 4) {
          if (at >= cols) continue;
          *reinterpret_cast<float4*>(line + at + j) =
              make_float4(held_[i][j], held_[i][j + 1], held_[i][j + 2], held_[i][j + 3]);
        }
      }
    }
  }

 private:
  float held_[Held > 0 ? Held : 1][N] = {};
};

constexpr int kSumColumns = 32;
constexpr int kSumRows = 16;

// Sums of the columns of (lines, cols): 16 threads a column, then their sums in order.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_columns(const float* __restrict__ from, int64_t lines, int64_t cols, void* to,
                Float dtype) {
  __shared__ float shared[kSumRows][kSumColumns];
  const int column = threadIdx.x % kSumColumns;
  const int group = threadIdx.x / kSumColumns;
  const int64_t at = blockIdx.x * int64_t{kSumColumns} + column;
  float sum = 0.0f;
  if (at < cols) {
#pragma unroll 4
    for (int64_t line = group; line < lines; line += kSumRows) sum += from[line * cols + at];
  }
  shared[group][column] = sum;
  __syncthreads();
  if (group != 0 || at >= cols) return;
  for (int i = 1; i < kSumRows; ++i) sum += shared[i][column];
  if (dtype == Float::bf16) {
    static_cast<bf16*>(to)[at] = rounded<bf16>(sum);
  } else if (dtype == Float::f16) {
    static_cast<f16*>(to)[at] = rounded<f16>(sum);
  } else {
    static_cast<float*>(to)[at] = sum;
  }
}

}  // namespace
}  // namespace ixt
