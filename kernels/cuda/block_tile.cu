// Quantize a tile of 128 x 128 or 128 x 64 elements at a time: every orientation that crosses rows.
//
// The tile is read once, into registers. Codes are converted once for each orientation, from pairs
// of one row or of one column, so no byte is ever moved inside a word; those of columns cross
// shared memory (16 KiB) to leave in lines of 128 bytes.
#include <algorithm>

#include "block_scale.cuh"
#include "tile_device.cuh"

namespace ixt {
namespace {

#ifndef IXT_TILE_BLOCKS
#define IXT_TILE_BLOCKS 3
#endif
#ifndef IXT_RASTER
#define IXT_RASTER 1
#endif

#ifndef IXT_NARROW
#define IXT_NARROW 0
#endif

constexpr int kParts = 4;  // blocks of 32 in a line of the tile, at most

struct TileScales {
  float part[2][kParts][kTileRows];    // amax of 32 elements of each row, of each column
  float factor[2][kParts][kTileRows];  // of each block, at its first part
};

struct TilePlace {
  int64_t m;  // first row
  int64_t k;  // first column
  int64_t tile_m;
  int64_t tile_k;
  bool first;
};

template <int Cols>
constexpr int kTileThreads = Cols * 2;

// Tiles of one column of IXT_RASTER tiles follow each other, then the next column's.
__device__ __forceinline__ TilePlace tile_place(uint32_t tiles_k, int cols, bool backwards) {
  const uint32_t tiles_m = gridDim.x / tiles_k;
  const uint32_t at = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t band = at / (tiles_k * IXT_RASTER);
  const uint32_t inside = at - band * (tiles_k * IXT_RASTER);
  const uint32_t height = min(static_cast<uint32_t>(IXT_RASTER), tiles_m - band * IXT_RASTER);
  const int64_t tile_k = inside / height;
  const int64_t tile_m = band * IXT_RASTER + (inside - tile_k * height);
  return {tile_m * kTileRows, tile_k * cols, tile_m, tile_k, at == 0};
}

// amax of the parts of a line -> factors and scales of its blocks.
template <typename Format, int Cols>
__device__ __forceinline__ void scale_line(const BlockArgs& a, const TilePlace& tile, int side,
                                           int line, TileScales& shared) {
  const ScaleView& view = a.side[side];
  if (view.data == nullptr) return;
  const int step = a.group / kGroup;
  const int parts = side ? kParts : Cols / kGroup;
  const int64_t line_at = (side ? tile.k : tile.m) + line;
  const int64_t block_at = (side ? tile.tile_m : tile.tile_k) * (parts / step);
  uint32_t packed = 0;
#pragma unroll 1
  for (int b = 0; b < parts; b += step) {
    float amax = 0.0f;
    if (a.columns != nullptr) {
      if (line_at < a.cols) amax = __ldg(a.columns + line_at);
    } else {
#pragma unroll 1
      for (int i = b; i < b + step; ++i) amax = fmaxf(amax, shared.part[side][i][line]);
    }
    const BlockScale scale = block_scale<Format>(amax, a.rule);
    shared.factor[side][b][line] = scale.factor;
    packed |= scale.stored << (8 * b);
    if (view.form != ScaleForm::swizzled) {
      store_scale(view, line_at, block_at + b / step, scale.stored);
    }
  }
  if (view.form != ScaleForm::swizzled) return;
  const int64_t pitch = swizzle_pitch(view);
  uint8_t* out = static_cast<uint8_t*>(view.data) + swizzled(line_at, block_at, pitch);
  if (parts == kParts) {  // this tile's scales are one tile of the layout
    *reinterpret_cast<uint32_t*>(out) = packed;
  } else if (block_at < pitch) {
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(packed);
  }
}

__device__ __forceinline__ void read_factors(const TileScales& shared, int side, int part, int line,
                                             float (&out)[kPatch]) {
  const auto* source = reinterpret_cast<const float4*>(&shared.factor[side][part][line]);
#pragma unroll
  for (int i = 0; i < kPatch; i += 4) {
    const float4 v = source[i / 4];
    out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
  }
}

// Factors of a patch: of its rows and of its columns.
struct PatchFactors {
  float row[kPatch];
  float col[kPatch];
};

template <typename T, typename Format, int Cols>
__device__ __forceinline__ void line_factors(const BlockArgs& a, const TilePlace& tile,
                                             const PatchPlace& at, const Patch<T>& patch,
                                             TileScales& shared, PatchFactors& factors) {
  if (a.side[0].data != nullptr) {
    *reinterpret_cast<float2*>(&shared.part[0][at.col / 32][at.row + at.lane % 4 * 2]) =
        patch.row_amax(at.lane);
  }
  if (a.side[1].data != nullptr && a.columns == nullptr) {
    *reinterpret_cast<float2*>(&shared.part[1][at.row / 32][at.col + at.lane / 8 * 2]) =
        patch.column_amax(at.lane);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTileRows + Cols; i += kTileThreads<Cols>) {
    const int side = i >= kTileRows;
    scale_line<Format, Cols>(a, tile, side, i - side * kTileRows, shared);
  }
  __syncthreads();
  const int first = ~(a.group / kGroup - 1);
  read_factors(shared, 0, at.col / 32 & first, at.row, factors.row);
  read_factors(shared, 1, at.row / 32 & first, at.col, factors.col);
}

// The scale of the square block that holds this patch.
template <typename T, typename Format>
__device__ __forceinline__ float square_factor(const BlockArgs& a, const TilePlace& tile,
                                               const PatchPlace& at, const Patch<T>& patch,
                                               TileScales& shared) {
  uint32_t word = patch.amax();
#pragma unroll
  for (int bit : {1, 2, 8, 16}) {
    word = max_magnitude<T>(word, __shfl_xor_sync(0xFFFFFFFFu, word, bit));
  }
  float* parts = &shared.part[0][0][0];
  if ((at.lane & ~4) == 0) parts[at.row / 32 * kParts + at.col / 32] = magnitude<T>(word);
  __syncthreads();
  const int step = a.group / kGroup;
  const int row = at.row / a.group * step;
  const int col = at.col / a.group * step;
  float amax = 0.0f;
  for (int i = 0; i < step; ++i) {
    for (int j = 0; j < step; ++j) amax = fmaxf(amax, parts[(row + i) * kParts + col + j]);
  }
  const BlockScale scale = block_scale<Format>(amax, a.rule);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const ScaleView& view = a.side[side];
    if (view.data == nullptr) continue;
    const int line = side ? at.col : at.row;
    const int across = side ? at.row : at.col;
    if (across % a.group != 0) continue;
    const int64_t line_at = (side ? tile.k : tile.m) + line;
    const int64_t block = ((side ? tile.m : tile.k) + across) / a.group;
    if (view.form == ScaleForm::swizzled) {  // every line of the block has the scale
      for (int i = 0; i < kPatch; ++i) {
        store_scale(view, line_at + i, block, line_at + i < view.lines ? scale.stored : 0u);
      }
    } else if (line % a.group == 0) {
      store_scale(view, line_at / a.group, block, scale.stored);
    }
  }
  return scale.factor;
}

// One scale for all of x, given or found by the kernel before this one.
template <typename T, typename Format>
__device__ __forceinline__ float whole_factor(const BlockArgs& a, const TilePlace& tile,
                                              const PatchPlace& at, const Patch<T>& patch,
                                              TileScales& shared) {
  float scale;
  if (a.scale != nullptr) {
    scale = *a.scale;
  } else {
    pdl_wait();
    scale = scale_from_amax<Format>(__ldcg(a.current), a.rule.fp8);
  }
  if (tile.first && threadIdx.x == 0) *a.scale_inv = __fdiv_rn(1.0f, scale);
  if (a.amax != nullptr) {
    const int best = __float_as_int(block_max(magnitude<T>(patch.amax()), &shared.part[0][0][0]));
    auto* target = reinterpret_cast<int*>(a.amax);
    if (threadIdx.x == 0 && best > *static_cast<volatile int*>(target)) atomicMax(target, best);
  }
  return scale;
}

// Codes of the patch: those of columns to the staged tile, those of rows to `rows`, 8 bytes each.
template <typename T, typename Format, BlockKind kind>
__device__ __forceinline__ void convert(const Patch<T>& patch, const PatchFactors& factors,
                                        const PatchPlace& at, bool by_rows, bool by_columns,
                                        uint8_t* tile, uint2 (&rows)[kPatch]) {
#pragma unroll
  for (int p = 0; p < kPatch / 2; ++p) {
    float2 v[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      v[i] = patch.pair(i, p);
      if constexpr (kind == BlockKind::one) {
        v[i] = {__fmul_rn(v[i].x, factors.row[0]), __fmul_rn(v[i].y, factors.row[0])};
      }
    }
    const auto times = [&](float value, int i, int j, bool by_row) {
      if constexpr (kind == BlockKind::one) return value;
      return __fmul_rn(value, by_row ? factors.row[i] : factors.col[j]);
    };
    if (by_columns) {
      constexpr bool by_row = kind == BlockKind::crossed;
      const int j = 2 * p;
      const auto x = [&](int i) { return times(v[i].x, i, j, by_row); };
      const auto y = [&](int i) { return times(v[i].y, i, j + 1, by_row); };
      *reinterpret_cast<uint2*>(tile + staged(at.col + j, at.row)) = {
          encode_quad<Format>(x(0), x(1), x(2), x(3)), encode_quad<Format>(x(4), x(5), x(6), x(7))};
      *reinterpret_cast<uint2*>(tile + staged(at.col + j + 1, at.row)) = {
          encode_quad<Format>(y(0), y(1), y(2), y(3)), encode_quad<Format>(y(4), y(5), y(6), y(7))};
    }
    if (!by_rows) continue;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      constexpr bool by_row = kind != BlockKind::crossed;
      const uint32_t pair = encode_pair<Format>(times(v[i].x, i, 2 * p, by_row),
                                                times(v[i].y, i, 2 * p + 1, by_row));
      uint32_t& word = p < 2 ? rows[i].x : rows[i].y;
      word = p % 2 ? word | pair << 16 : pair;
    }
  }
}

template <typename T, typename Format, BlockKind kind, int Cols>
__global__ void __launch_bounds__(kTileThreads<Cols>,
                                  (sizeof(T) == 4 ? 2 : IXT_TILE_BLOCKS) * 128 / Cols)
    quantize_tile(const __grid_constant__ BlockArgs a, uint32_t tiles_k, bool wide, bool wide_t) {
  __shared__ __align__(16) uint8_t staging[Cols * kLineBytes];
  __shared__ __align__(16) TileScales shared;
  const TilePlace tile = tile_place(tiles_k, Cols, a.current != nullptr);
  const PatchPlace at;
  const int64_t row = tile.m + at.row;
  const int64_t col = tile.k + at.col;
  const int rows_left = static_cast<int>(min(a.rows - row, int64_t{kPatch}));
  const int cols_left = static_cast<int>(min(a.cols - col, int64_t{kPatch}));
  Patch<T> patch;
  patch.load(static_cast<const T*>(a.x) + row * a.stride + col, a.stride, rows_left, cols_left,
             wide);
  PatchFactors factors;
  if constexpr (kind != BlockKind::one) {
    line_factors<T, Format, Cols>(a, tile, at, patch, shared, factors);
  } else if (a.scale_inv != nullptr) {
    factors.row[0] = whole_factor<T, Format>(a, tile, at, patch, shared);
  } else {
    factors.row[0] = square_factor<T, Format>(a, tile, at, patch, shared);
  }
  uint2 codes[kPatch];
  convert<T, Format, kind>(patch, factors, at, a.codes != nullptr, a.codes_t != nullptr, staging,
                           codes);
  uint8_t* out = a.codes + row * a.cols + col;
  if (a.codes != nullptr && wide && cols_left > 0) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      if (i < rows_left) *reinterpret_cast<uint2*>(out + i * a.cols) = codes[i];
    }
  }
  const int height = static_cast<int>(min(a.rows - tile.m, int64_t{kTileRows}));
  const int width = static_cast<int>(min(a.cols - tile.k, int64_t{Cols}));
  if (a.codes_t != nullptr) {
    __syncthreads();
    copy_staged(staging, a.codes_t + tile.k * a.rows + tile.m, a.rows, width, height, wide_t);
  }
  if (a.codes == nullptr || wide) return;
  // Rows that allow no 8-byte store leave through shared memory, 64 at a time.
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    __syncthreads();
    if (at.row / 64 == half) {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        *reinterpret_cast<uint2*>(staging + staged(at.row % 64 + i, at.col)) = codes[i];
      }
    }
    __syncthreads();
    copy_staged(staging, a.codes + (tile.m + 64 * half) * a.cols + tile.k, a.cols,
                min(height - 64 * half, 64), width, false);
  }
}

template <typename T, typename Format, BlockKind kind, int Cols>
void launch_tiles(const BlockArgs& a, Target target) {
  const int64_t tiles_m = std::max<int64_t>(1, (a.rows + kTileRows - 1) / kTileRows);
  const bool padded = a.side[0].form == ScaleForm::swizzled || a.side[1].form == ScaleForm::swizzled;
  const int64_t cols = padded ? round_up(a.cols, kSwizzleRows) : a.cols;
  const int64_t tiles_k = std::max<int64_t>(1, (cols + Cols - 1) / Cols);
  IXT_CHECK(tiles_m * tiles_k <= 0x7FFFFFFF, "`x` must have at most 2**44 elements, got ",
            a.rows * a.cols);
  const bool wide =
      aligned16(a.x) && (a.stride * sizeof(T) % 16 == 0 || a.rows <= 1) && a.cols % kPatch == 0;
  const bool wide_t = a.rows % 16 == 0;
  auto* kernel = quantize_tile<T, Format, kind, Cols>;
  const bool overlap = a.current != nullptr && can_overlap(target.device, kernel);
  launch(kernel, tiles_m * tiles_k, kTileThreads<Cols>, target.stream, overlap, a, tiles_k, wide,
         wide_t);
}

}  // namespace

void launch_block_tiles(const BlockArgs& args, BlockKind kind, Float in, Fp8 out, Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (kind == BlockKind::lines) {
#if IXT_NARROW
      if (args.group < 128 || args.side[0].data == nullptr) {
        return launch_tiles<T, Format, BlockKind::lines, 64>(args, target);
      }
#endif
      launch_tiles<T, Format, BlockKind::lines, 128>(args, target);
    } else if (kind == BlockKind::crossed) {
      launch_tiles<T, Format, BlockKind::crossed, 128>(args, target);
    } else {
#if IXT_NARROW
      if (args.group < 128) return launch_tiles<T, Format, BlockKind::one, 64>(args, target);
#endif
      launch_tiles<T, Format, BlockKind::one, 128>(args, target);
    }
  });
}

}  // namespace ixt
