// Blocks along rows only: four lanes of a warp share the amax of 32 elements, nothing is staged.
//
// A warp takes 8 rows x 256 columns, a patch of 8 x 8 elements a thread, so a lane is left with the
// amax of two rows and computes their two scales for the other lanes of the block.
#include <algorithm>

#include "block_scale.cuh"
#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kRowThreads = 256;
constexpr int kWarps = kRowThreads / kWarp;
constexpr int kWarpCols = kWarp * kPatch;

// The e8m0 scales of blocks of 32, four of a row at once: of the 16 lanes that hold them, for 8
// rows, each of the first eight stores those of one row.
__device__ __forceinline__ void store_words(const ScaleView& view, int64_t row, int64_t block,
                                            int lane, uint32_t even, uint32_t odd) {
  const bool upper = lane & 4;
  const uint32_t mine = upper ? odd : even;
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? even : odd, 4);
  uint32_t word = upper ? other | mine << 8 : mine | other << 8;
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 8) << 16;
  if (lane & 8) return;
  const int64_t line = row + lane % 4 * 2 + upper;
  const bool padded = view.form == ScaleForm::swizzled;
  block &= ~int64_t{3};
  const int64_t pitch = padded ? swizzle_pitch(view) : view.blocks;
  if (block >= pitch || line >= (padded ? round_up(view.lines, kSwizzleRows) : view.lines)) return;
  const int64_t at = padded ? swizzled(line, block, pitch) : line * view.line + block;
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(view.data) + at) = word;
}

template <typename T, typename Format>
__global__ void __launch_bounds__(kRowThreads, sizeof(T) == 4 ? 2 : 4)
    quantize_block_rows(const __grid_constant__ BlockArgs a, uint32_t tiles_k, int warps_k,
                        bool wide, bool words) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int lanes = a.group / kPatch;  // that share a block
  const uint32_t tile_m = blockIdx.x / tiles_k;
  const uint32_t tile_k = blockIdx.x - tile_m * tiles_k;
  const int64_t row = (int64_t{tile_m} * (kWarps / warps_k) + warp / warps_k) * kPatch;
  const int64_t col = (int64_t{tile_k} * warps_k + warp % warps_k) * kWarpCols + lane * kPatch;
  const int rows_left = static_cast<int>(min(a.rows - row, int64_t{kPatch}));
  const int cols_left = static_cast<int>(min(a.cols - col, int64_t{kPatch}));
  Patch<T> patch;
  patch.load(static_cast<const T*>(a.x) + row * a.stride + col, a.stride, rows_left, cols_left,
             wide);

  float2 amax = patch.row_amax(lane);
  for (int bit = 4; bit < lanes; bit *= 2) {
    amax.x = fmaxf(amax.x, __shfl_xor_sync(0xFFFFFFFFu, amax.x, bit));
    amax.y = fmaxf(amax.y, __shfl_xor_sync(0xFFFFFFFFu, amax.y, bit));
  }
  const BlockScale even = block_scale<Format>(amax.x, a.rule);
  const BlockScale odd = block_scale<Format>(amax.y, a.rule);
  const int64_t block = block_index(col, a.group);
  if (words) {
    store_words(a.side[0], row, block, lane, even.stored, odd.stored);
  } else if ((lane & (lanes - 1)) < 4) {
    const int64_t line = row + lane % 4 * 2;
    store_scale(a.side[0], line, block, even.stored);
    store_scale(a.side[0], line + 1, block, odd.stored);
  }
  uint8_t* out = a.codes + row * a.cols + col;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const float factor = __shfl_sync(0xFFFFFFFFu, i % 2 ? odd.factor : even.factor, i / 2, 4);
    float v[kPatch];
#pragma unroll
    for (int p = 0; p < kPatch / 2; ++p) {
      const float2 pair = patch.pair(i, p);
      v[2 * p] = __fmul_rn(pair.x, factor);
      v[2 * p + 1] = __fmul_rn(pair.y, factor);
    }
    const uint2 codes = {encode_quad<Format>(v[0], v[1], v[2], v[3]),
                         encode_quad<Format>(v[4], v[5], v[6], v[7])};
    if (i >= rows_left || cols_left <= 0) continue;
    if (wide) {
      *reinterpret_cast<uint2*>(out + i * a.cols) = codes;
    } else {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        const uint32_t word = j < 4 ? codes.x : codes.y;
        if (j < cols_left) out[i * a.cols + j] = static_cast<uint8_t>(word >> (8 * (j % 4)));
      }
    }
  }
}

template <typename T, typename Format>
void launch_rows(const BlockArgs& a, Target target) {
  // The padding of swizzled scales belongs to blocks of zeros.
  const ScaleView& view = a.side[0];
  const bool padded = view.form == ScaleForm::swizzled;
  const bool words = padded || (view.form == ScaleForm::e8m0 && view.blocks % 4 == 0);
  const int64_t rows = padded ? round_up(a.rows, kSwizzleRows) : a.rows;
  const int64_t cols = padded ? round_up(a.cols, kSwizzleCols * a.group) : a.cols;
  int warps_k = 1;  // side by side, so that neighbouring scales are written together
  while (warps_k < kWarps && warps_k * kWarpCols < cols) warps_k *= 2;
  const int64_t tile_rows = int64_t{kPatch} * (kWarps / warps_k);
  const int64_t tile_cols = int64_t{kWarpCols} * warps_k;
  const int64_t tiles_m = (rows + tile_rows - 1) / tile_rows;
  const int64_t tiles_k = (cols + tile_cols - 1) / tile_cols;
  IXT_CHECK(tiles_m * tiles_k <= 0x7FFFFFFF, "`x` must have at most 2**45 elements, got ",
            a.rows * a.cols);
  const bool wide =
      aligned16(a.x) && (a.stride * sizeof(T) % 16 == 0 || a.rows <= 1) && a.cols % kPatch == 0;
  launch(quantize_block_rows<T, Format>, tiles_m * tiles_k, kRowThreads, target.stream, false, a,
         tiles_k, warps_k, wide, words);
}

}  // namespace

void launch_block_rows(const BlockArgs& args, Float in, Fp8 out, Target target) {
  if (args.rows == 0 || args.cols == 0) return;
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    launch_rows<decltype(t), decltype(format)>(args, target);
  });
}

}  // namespace ixt
