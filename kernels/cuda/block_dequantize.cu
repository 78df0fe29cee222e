// Dequantize codes with a scale a block: as one long row where scales lie in lines, else a few rows
// x 8 columns a thread, with one scale a row or one a column; a warp then takes 256 columns.
//
// Loading the scales of a warp's rows by one lane each and passing them on by shuffles was slower
// by 4 %. Of an H200's copy, 128x128 blocks reach 95.4 % with 2 rows a thread and 4 warps a block,
// 93.6 with 4 and 8, 84 with 1 and 4.
#include "block_scale.cuh"
#include "fp8_device.cuh"
#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kDequantizeThreads = 128;
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

// The warps of a block lie side by side, a thread takes 2 rows with a scale each.
constexpr int kRows = 2;

template <ScaleForm form>
__device__ __forceinline__ void load_scales(const DequantizeArgs& a, int64_t row, int64_t col,
                                            int rows, uint32_t (&stored)[kRows]) {
  const int64_t block_row = block_index(row, a.block_m);
  const int64_t k = block_index(col, a.block_k);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t m = a.block_m == 1 ? row + i : block_row;
    stored[i] = i < rows ? load_scale<form>(a.scales, m * a.line_step, k) : 0;
  }
}

template <typename T, typename Format>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_rows(const __grid_constant__ DequantizeArgs a, uint32_t tiles_k, int warps_k,
                    bool wide) {
  const int warp = threadIdx.x / kWarp;
  const uint32_t tile_m = blockIdx.x / tiles_k;
  const uint32_t tile_k = blockIdx.x - tile_m * tiles_k;
  const int64_t row = (int64_t{tile_m} * (kWarps / warps_k) + warp / warps_k) * kRows;
  const int64_t col = (int64_t{tile_k} * warps_k + warp % warps_k) * kWarpCols +
                      threadIdx.x % kWarp * kPatch;
  const int rows = static_cast<int>(min(a.rows - row, int64_t{kRows}));
  const int cols = static_cast<int>(min(a.cols - col, int64_t{kPatch}));
  if (rows <= 0 || cols <= 0) return;
  const int64_t at = row * a.cols + col;
  uint2 codes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    codes[i] = uint2{0, 0};
    if (i < rows) codes[i] = load_codes(a.codes + at + i * a.cols, cols, wide);
  }
  uint32_t stored[kRows];
  const ScaleForm form = a.scales.form;
  if (form == ScaleForm::fp32) {
    load_scales<ScaleForm::fp32>(a, row, col, rows, stored);
  } else if (form == ScaleForm::swizzled) {
    load_scales<ScaleForm::swizzled>(a, row, col, rows, stored);
  } else {
    load_scales<ScaleForm::e8m0>(a, row, col, rows, stored);
  }
  float scale[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) scale[i] = scale_value(stored[i], form);
  T* y = static_cast<T*>(a.y) + at;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float of[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) of[j] = scale[i];
    if (i < rows) store_values<T, Format>(y + i * a.cols, codes[i], of, cols, wide);
  }
}

// Blocks along columns: a thread takes 8 rows, which share the scales of its 8 columns. Of a block's
// warps, two lie side by side, and those below them find their scales in the L1 cache.
constexpr int kColumnRows = 8;
constexpr int kColumnWarps = 2;
constexpr int kColumnThreads = 256;

template <ScaleForm form>
__device__ __forceinline__ void load_columns(const DequantizeArgs& a, int64_t row, int64_t col,
                                             int cols, uint32_t (&stored)[kPatch]) {
  const int64_t m = block_index(row, a.block_m);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const int64_t line = a.lines_are_columns ? col + i : m;
    stored[i] = i < cols ? load_scale<form>(a.scales, line, a.lines_are_columns ? m : col + i) : 0;
  }
}

// All eight at once.
__device__ __forceinline__ void load_eight(const DequantizeArgs& a, int64_t row, int64_t col,
                                           uint32_t (&stored)[kPatch]) {
  const int64_t at = block_index(row, a.block_m) * a.scales.line + col;
  if (a.scales.form == ScaleForm::fp32) {
    const auto* source =
        reinterpret_cast<const uint4*>(static_cast<const float*>(a.scales.data) + at);
    const uint4 low = __ldg(source);
    const uint4 high = __ldg(source + 1);
    stored[0] = low.x, stored[1] = low.y, stored[2] = low.z, stored[3] = low.w;
    stored[4] = high.x, stored[5] = high.y, stored[6] = high.z, stored[7] = high.w;
    return;
  }
  const uint2 v =
      __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(a.scales.data) + at));
#pragma unroll
  for (int i = 0; i < kPatch; ++i) stored[i] = (i < 4 ? v.x : v.y) >> (8 * (i % 4)) & 0xFFu;
}

//
// One block an SM is all that is asked for: the compiler then spends 72 registers on loads under
// way; at 48 registers this ran at 88 % of a copy's speed instead of 94, and with `warps_k` a
// constant at 92.
template <typename T, typename Format>
__global__ void __launch_bounds__(kColumnThreads, 1)
    dequantize_columns(const __grid_constant__ DequantizeArgs a, uint32_t tiles_k, int warps_k,
                       bool wide, bool eight) {
  constexpr int R = kColumnRows;
  const int warp = threadIdx.x / kWarp;
  const uint32_t tile_m = blockIdx.x / tiles_k;
  const uint32_t tile_k = blockIdx.x - tile_m * tiles_k;
  const int64_t row = (int64_t{tile_m} * (kColumnThreads / kWarp / warps_k) + warp / warps_k) * R;
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
  uint32_t stored[kPatch];
  const ScaleForm form = a.scales.form;
  if (eight) {
    load_eight(a, row, col, stored);
  } else if (form == ScaleForm::fp32) {
    load_columns<ScaleForm::fp32>(a, row, col, cols, stored);
  } else if (form == ScaleForm::swizzled) {
    load_columns<ScaleForm::swizzled>(a, row, col, cols, stored);
  } else {
    load_columns<ScaleForm::e8m0>(a, row, col, cols, stored);
  }
  float scale[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) scale[i] = scale_value(stored[i], form);
  T* y = static_cast<T*>(a.y) + at;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    if (i < rows) store_values<T, Format>(y + i * a.cols, codes[i], scale, cols, wide);
  }
}

// Rows of whole blocks with their scales in lines are one long row.
constexpr int kUnroll = 2;  // vectors a thread

template <typename T, typename Format, ScaleForm form>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_line(const uint8_t* __restrict__ codes, const __grid_constant__ ScaleView scales,
                    T* __restrict__ y, int64_t vectors, int shift) {
  constexpr int N = kVector<T>;
  const int64_t first = blockIdx.x * int64_t{kDequantizeThreads * kUnroll} + threadIdx.x;
  Raw<N> code[kUnroll];
  uint32_t stored[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kDequantizeThreads;
    if (at >= vectors) continue;
    code[i] = __ldg(reinterpret_cast<const Raw<N>*>(codes) + at);
    stored[i] = load_scale<form>(scales, 0, at >> shift);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * kDequantizeThreads;
    if (at >= vectors) continue;
    reinterpret_cast<Raw<16>*>(y)[at] =
        dequantize<T, Format, N>(code[i], scale_value(stored[i], form));
  }
}

// ----------------------------------------------------------------------------------------- host

void check_grid(int64_t blocks, const DequantizeArgs& a) {
  IXT_CHECK(blocks <= 0x7FFFFFFF, "`codes` must have at most 2**42 elements, got ",
            a.rows * a.cols);
}

template <typename T>
bool is_line(const DequantizeArgs& a) {
  const ScaleView& view = a.scales;
  return a.block_m == 1 && view.form != ScaleForm::swizzled && view.block == 1 &&
         (view.line == view.blocks || a.rows == 1) && a.cols % a.block_k == 0 &&
         reinterpret_cast<uintptr_t>(a.codes) % kVector<T> == 0;
}

template <typename T, typename Format>
void launch_line(const DequantizeArgs& a, Target target) {
  const int64_t vectors = a.rows * a.cols / kVector<T>;
  constexpr int64_t tile = kDequantizeThreads * kUnroll;
  int shift = 0;
  while (kVector<T> << shift < a.block_k) ++shift;
  const auto kernel = a.scales.form == ScaleForm::fp32
                          ? dequantize_line<T, Format, ScaleForm::fp32>
                          : dequantize_line<T, Format, ScaleForm::e8m0>;
  check_grid((vectors + tile - 1) / tile, a);
  launch(kernel, (vectors + tile - 1) / tile, kDequantizeThreads, target.stream, false, a.codes,
         a.scales, static_cast<T*>(a.y), vectors, shift);
}

template <typename T, typename Format>
void launch_rows(const DequantizeArgs& a, bool wide, Target target) {
  int warps_k = 1;
  while (warps_k < kWarps && warps_k * kWarpCols < a.cols) warps_k *= 2;
  const int64_t tile_rows = int64_t{kRows} * (kWarps / warps_k);
  const int64_t tile_cols = int64_t{kWarpCols} * warps_k;
  const int64_t tiles_m = (a.rows + tile_rows - 1) / tile_rows;
  const int64_t tiles_k = (a.cols + tile_cols - 1) / tile_cols;
  check_grid(tiles_m * tiles_k, a);
  launch(dequantize_rows<T, Format>, tiles_m * tiles_k, kDequantizeThreads, target.stream, false, a,
         tiles_k, warps_k, wide);
}

template <typename T, typename Format>
void launch_columns(const DequantizeArgs& a, bool wide, Target target) {
  constexpr int64_t height = int64_t{kColumnRows} * (kColumnThreads / kWarp / kColumnWarps);
  constexpr int64_t width = int64_t{kWarpCols} * kColumnWarps;
  const int64_t tiles_m = (a.rows + height - 1) / height;
  const int64_t tiles_k = (a.cols + width - 1) / width;
  const ScaleView& view = a.scales;
  const int alignment = view.form == ScaleForm::fp32 ? 16 : kPatch;
  const bool eight = view.form != ScaleForm::swizzled && view.block == 1 &&
                     view.line % kPatch == 0 && a.cols % kPatch == 0 &&
                     reinterpret_cast<uintptr_t>(view.data) % alignment == 0;
  check_grid(tiles_m * tiles_k, a);
  launch(dequantize_columns<T, Format>, tiles_m * tiles_k, kColumnThreads, target.stream, false, a,
         tiles_k, kColumnWarps, wide, eight);
}

}  // namespace

void launch_block_dequantize(const DequantizeArgs& args, Fp8 in, Float out, Target target) {
  if (args.rows == 0 || args.cols == 0) return;
  with_types<bf16, f16>(out, in, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    const bool wide = reinterpret_cast<uintptr_t>(args.codes) % kPatch == 0 &&
                      args.cols % kPatch == 0;
    if (is_line<T>(args)) {
      launch_line<T, Format>(args, target);
    } else if (args.block_k == 1) {
      launch_columns<T, Format>(args, wide, target);
    } else {
      launch_rows<T, Format>(args, wide, target);
    }
  });
}

}  // namespace ixt
