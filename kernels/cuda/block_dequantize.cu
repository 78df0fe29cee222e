// Dequantize codes with a scale a block: a few rows x 8 columns a thread, with one scale a row or
// one a column; a warp takes 256 columns.
//
// Loading the scales of a warp's rows by one lane each and passing them on by shuffles was slower
// by 4 %, and so were 2 or 8 rows a thread.
#include <algorithm>

#include "block_scale.cuh"
#include "fp8_device.cuh"
#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kDequantizeThreads = 256;
constexpr int kWarps = kDequantizeThreads / kWarp;
constexpr int kWarpCols = kWarp * kPatch;

template <typename T, typename Format>
__device__ __forceinline__ void store_values(T* y, const uint2& codes, const float (&scale)[kPatch],
                                             int cols, bool wide) {
  float v[kPatch];
#pragma unroll
  for (int j = 0; j < kPatch; j += 2) {
    const uint32_t word = j < 4 ? codes.x : codes.y;
    const float2 pair = decode_pair<Format>(word >> (8 * (j % 4)));
    v[j] = __fmul_rn(pair.x, scale[j]);
    v[j + 1] = __fmul_rn(pair.y, scale[j + 1]);
  }
  constexpr int per_word = 4 / sizeof(T);
  uint32_t words[kPatch / per_word];
#pragma unroll
  for (int w = 0; w < kPatch / per_word; ++w) {
    words[w] = pack_pair<T>(v[w * per_word], v[w * per_word + per_word - 1]);
  }
  if (wide) {
#pragma unroll
    for (int w = 0; w < kPatch / per_word; w += 4) {
      reinterpret_cast<uint4*>(y)[w / 4] = {words[w], words[w + 1], words[w + 2], words[w + 3]};
    }
    return;
  }
  auto* out = reinterpret_cast<Raw<sizeof(T)>*>(y);
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    const uint32_t word = words[j / per_word] >> (16 * (j % per_word));
    if (j < cols) out[j] = static_cast<Raw<sizeof(T)>>(word);
  }
}

__device__ __forceinline__ uint2 load_codes(const uint8_t* __restrict__ codes, int cols,
                                            bool wide) {
  if (wide) return __ldg(reinterpret_cast<const uint2*>(codes));
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    if (j < cols) word[j / 4] |= static_cast<uint32_t>(__ldg(codes + j)) << (8 * (j % 4));
  }
  return {word[0], word[1]};
}

// PerColumn: the rows of a thread share the scales of their 8 columns; else the columns share one a
// row. No block ends between the rows of a thread.
template <bool PerColumn>
constexpr int kRows = PerColumn ? 8 : 4;

template <bool PerColumn, ScaleForm form, int N>
__device__ __forceinline__ void load_scales(const DequantizeArgs& a, int64_t row, int64_t col,
                                            int count, uint32_t (&stored)[N]) {
  const int64_t block_row = block_index(row, a.block_m);
  const int64_t block_col = block_index(col, a.block_k);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int64_t m = !PerColumn && a.block_m == 1 ? row + i : block_row;
    const int64_t k = PerColumn ? col + i : block_col;
    const int64_t line = a.lines_are_columns ? k : m * a.line_step;
    stored[i] = i < count ? load_scale<form>(a.scales, line, a.lines_are_columns ? m : k) : 0;
  }
}

// The e8m0 scales of 8 columns at once.
__device__ __forceinline__ void load_eight(const DequantizeArgs& a, int64_t row, int64_t col,
                                           uint32_t (&stored)[kPatch]) {
  const int64_t at = block_index(row, a.block_m) * a.scales.line + col;
  const uint2 v =
      __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(a.scales.data) + at));
#pragma unroll
  for (int i = 0; i < kPatch; ++i) stored[i] = (i < 4 ? v.x : v.y) >> (8 * (i % 4)) & 0xFFu;
}

template <typename T, typename Format, bool PerColumn>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_blocks(const __grid_constant__ DequantizeArgs a, uint32_t tiles_k, int warps_k,
                      bool wide, bool eight) {
  constexpr int R = kRows<PerColumn>;
  constexpr int S = PerColumn ? kPatch : R;
  const int warp = threadIdx.x / kWarp;
  const uint32_t tile_m = blockIdx.x / tiles_k;
  const uint32_t tile_k = blockIdx.x - tile_m * tiles_k;
  const int64_t row = (int64_t{tile_m} * (kWarps / warps_k) + warp / warps_k) * R;
  const int64_t col = (int64_t{tile_k} * warps_k + warp % warps_k) * kWarpCols +
                      threadIdx.x % kWarp * kPatch;
  const int rows = static_cast<int>(min(a.rows - row, int64_t{R}));
  const int cols = static_cast<int>(min(a.cols - col, int64_t{kPatch}));
  if (rows <= 0 || cols <= 0) return;
  const int64_t at = row * a.cols + col;
  uint2 codes[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    codes[i] = uint2{0, 0};
    if (i < rows) codes[i] = load_codes(a.codes + at + i * a.cols, cols, wide);
  }
  uint32_t stored[S];
  const int count = PerColumn ? cols : rows;
  const ScaleForm form = a.scales.form;
  if (form == ScaleForm::fp32) {
    load_scales<PerColumn, ScaleForm::fp32>(a, row, col, count, stored);
  } else if (form == ScaleForm::swizzled) {
    load_scales<PerColumn, ScaleForm::swizzled>(a, row, col, count, stored);
  } else if (PerColumn && eight) {
    if constexpr (PerColumn) load_eight(a, row, col, stored);
  } else {
    load_scales<PerColumn, ScaleForm::e8m0>(a, row, col, count, stored);
  }
  float scale[S];
#pragma unroll
  for (int i = 0; i < S; ++i) scale[i] = scale_value(stored[i], form);
  T* y = static_cast<T*>(a.y) + at;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    float of[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) of[j] = scale[PerColumn ? j : i];
    if (i < rows) store_values<T, Format>(y + i * a.cols, codes[i], of, cols, wide);
  }
}

template <typename T, typename Format, bool PerColumn>
void launch_dequantize_blocks(const DequantizeArgs& a, Target target) {
  // Scales of columns are shared by warps below each other, those of rows lie side by side.
  int warps_k = 1;
  while (!PerColumn && warps_k < kWarps && warps_k * kWarpCols < a.cols) warps_k *= 2;
  const int64_t tile_rows = int64_t{kRows<PerColumn>} * (kWarps / warps_k);
  const int64_t tile_cols = int64_t{kWarpCols} * warps_k;
  const int64_t tiles_m = (a.rows + tile_rows - 1) / tile_rows;
  const int64_t tiles_k = (a.cols + tile_cols - 1) / tile_cols;
  IXT_CHECK(tiles_m * tiles_k <= 0x7FFFFFFF, "`codes` must have at most 2**42 elements, got ",
            a.rows * a.cols);
  const bool wide = reinterpret_cast<uintptr_t>(a.codes) % kPatch == 0 && a.cols % kPatch == 0;
  const bool eight = a.scales.form == ScaleForm::e8m0 && a.scales.block == 1 &&
                     a.scales.line % kPatch == 0 && a.cols % kPatch == 0 &&
                     reinterpret_cast<uintptr_t>(a.scales.data) % kPatch == 0;
  launch(dequantize_blocks<T, Format, PerColumn>, tiles_m * tiles_k, kDequantizeThreads,
         target.stream, false, a, tiles_k, warps_k, wide, eight);
}

}  // namespace

void launch_block_dequantize(const DequantizeArgs& args, Fp8 in, Float out, Target target) {
  if (args.rows == 0 || args.cols == 0) return;
  with_types<bf16, f16>(out, in, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (args.block_k == 1) {
      launch_dequantize_blocks<T, Format, true>(args, target);
    } else {
      launch_dequantize_blocks<T, Format, false>(args, target);
    }
  });
}

}  // namespace ixt
