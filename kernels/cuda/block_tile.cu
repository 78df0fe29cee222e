// Quantize a tile of 128 x 128 elements at a time: every orientation that crosses rows.
//
// The tile is read once, into registers. Codes are converted once for each orientation, from pairs
// of one row or of one column, so no byte is ever moved inside a word; those of columns cross
// shared memory (16 KiB) to leave in lines of 128 bytes. Scales leave last: those that lie apart
// take one access each, which must not stand between the codes and their barrier.
#include <algorithm>

#include "block_scale.cuh"
#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kTileCols = 128;
constexpr int kTileThreads = 256;
constexpr int kParts = 4;  // blocks of 32 in a line of the tile

template <BlockKind kind>
constexpr bool kBothSides = kind == BlockKind::lines || kind == BlockKind::beside;

// Thread blocks an SM: 80 registers a thread where both scales of a patch are needed, else 64.
template <typename T, BlockKind kind>
constexpr int kResident = sizeof(T) == 4 ? 2 : kBothSides<kind> ? 3 : 4;

struct TileScales {
  float part[2][kParts][kTileRows];  // amax of 32 elements of each row, of each column
  float factor[2][kParts][kTileRows];
  uint32_t stored[2][kParts][kTileRows];
};

struct TilePlace {
  int64_t m;  // first row
  int64_t k;  // first column
  bool first;
};

// The tile's lines and parts of one side.
__device__ __forceinline__ int64_t first_line(const TilePlace& tile, int side) {
  return side ? tile.k : tile.m;
}
__device__ __forceinline__ int64_t first_part(const TilePlace& tile, int side) {
  return (side ? tile.m : tile.k) / kGroup;
}

// amax of the parts of a line -> factors and scales of its blocks. One thread a line of a side.
template <typename Format>
__device__ __forceinline__ void scale_line(const BlockArgs& a, const TilePlace& tile,
                                           TileScales& shared) {
  const int side = threadIdx.x / kTileRows;
  const int line = threadIdx.x % kTileRows;
  if (a.side[side].data == nullptr) return;
  const int step = a.group / kGroup;
#pragma unroll 1
  for (int b = 0; b < kParts; b += step) {
    float amax = 0.0f;
    if (a.columns != nullptr) {
      if (tile.k + line < a.cols) amax = __ldg(a.columns + tile.k + line);
    } else {
#pragma unroll 1
      for (int i = b; i < b + step; ++i) amax = fmaxf(amax, shared.part[side][i][line]);
    }
    const BlockScale scale = block_scale<Format>(amax, a.rule);
    shared.factor[side][b][line] = scale.factor;
    shared.stored[side][b][line] = scale.stored;
  }
}

// Scales of lines, each by the thread that computed it.
__device__ __forceinline__ void store_lines(const BlockArgs& a, const TilePlace& tile,
                                            const TileScales& shared) {
  const int side = threadIdx.x / kTileRows;
  const int line = threadIdx.x % kTileRows;
  const ScaleView& view = a.side[side];
  if (view.data == nullptr) return;
  const int step = a.group / kGroup;
  const int64_t line_at = first_line(tile, side) + line;
  const int64_t block_at = block_index(first_part(tile, side), step);
  if (step == 1) {
    uint32_t stored[kParts];
#pragma unroll
    for (int b = 0; b < kParts; ++b) stored[b] = shared.stored[side][b][line];
    store_four(view, line_at, block_at, stored);
    return;
  }
  for (int b = 0; b < kParts; b += step) {
    store_scale(view, line_at, block_index(b, step) + block_at, shared.stored[side][b][line]);
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

// Factors of a patch: of its rows and of its columns. BlockKind::one has one, row[0].
struct PatchFactors {
  float row[kPatch];
  float col[kPatch];
};

template <typename T, typename Format, BlockKind kind>
__device__ __forceinline__ void line_factors(const BlockArgs& a, const TilePlace& tile,
                                             const PatchPlace& at, const Patch<T>& patch,
                                             TileScales& shared, PatchFactors& factors) {
  constexpr bool both = kBothSides<kind>;
  const bool by_rows = both || (kind == BlockKind::crossed && a.side[0].data != nullptr);
  const bool by_columns = both || kind == BlockKind::columns || !by_rows;
  if (by_rows) {
    *reinterpret_cast<float2*>(&shared.part[0][at.col / 32][at.row + at.lane % 4 * 2]) =
        patch.row_amax(at.lane);
  }
  if (by_columns && (both || a.columns == nullptr)) {
    *reinterpret_cast<float2*>(&shared.part[1][at.row / 32][at.col + at.lane / 8 * 2]) =
        patch.column_amax(at.lane);
  }
  __syncthreads();
  scale_line<Format>(a, tile, shared);
  __syncthreads();
  const int first = ~(a.group / kGroup - 1);
  if (by_rows) read_factors(shared, 0, at.col / 32 & first, at.row, factors.row);
  if (by_columns) read_factors(shared, 1, at.row / 32 & first, at.col, factors.col);
}

// The factor of the square block that holds this patch; its scale is kept at [row / 32][col / 32].
template <typename T, typename Format>
__device__ __forceinline__ float square_factor(const BlockArgs& a, const PatchPlace& at,
                                               const Patch<T>& patch, TileScales& shared) {
  uint32_t word = patch.amax();
#pragma unroll
  for (int bit : {1, 2, 8, 16}) {
    word = max_magnitude<T>(word, __shfl_xor_sync(0xFFFFFFFFu, word, bit));
  }
  const bool first = (at.lane & ~4) == 0;  // of its 32 x 32 elements
  const int part_row = at.row / kGroup;
  const int part_col = at.col / kGroup;
  if (first) shared.part[0][part_row][part_col] = magnitude<T>(word);
  __syncthreads();
  const int step = a.group / kGroup;
  const int row = part_row & ~(step - 1);
  const int col = part_col & ~(step - 1);
  float amax = 0.0f;
#pragma unroll 1
  for (int i = 0; i < step; ++i) {
#pragma unroll 1
    for (int j = 0; j < step; ++j) amax = fmaxf(amax, shared.part[0][row + i][col + j]);
  }
  const BlockScale scale = block_scale<Format>(amax, a.rule);
  if (first) shared.stored[0][part_row][part_col] = scale.stored;
  return scale.factor;
}

__device__ __forceinline__ void store_squares(const BlockArgs& a, const TilePlace& tile,
                                              const TileScales& shared) {
  const int side = threadIdx.x / kTileRows;
  const int line = threadIdx.x % kTileRows;
  const ScaleView& view = a.side[side];
  if (view.data == nullptr) return;
  const auto at = [&](int line_part, int part) {
    return side ? shared.stored[0][part][line_part] : shared.stored[0][line_part][part];
  };
  if (view.form == ScaleForm::swizzled) {  // every line of a block has its scale
    const int64_t line_at = first_line(tile, side) + line;
    uint32_t stored[kParts];
#pragma unroll
    for (int b = 0; b < kParts; ++b) stored[b] = line_at < view.lines ? at(line / kGroup, b) : 0;
    store_four(view, line_at, first_part(tile, side), stored);
    return;
  }
  const int step = a.group / kGroup;
  const int line_part = line / kParts;
  const int part = line % kParts;
  if (line_part >= kParts || (line_part | part) % step != 0) return;
  store_scale(view, block_index(first_line(tile, side) / kGroup + line_part, step),
              block_index(first_part(tile, side) + part, step), at(line_part, part));
}

// One scale for all of x, given or found by the kernel before this one.
template <typename T, typename Format>
__device__ __forceinline__ float whole_factor(const BlockArgs& a, const TilePlace& tile,
                                              const Patch<T>& patch, TileScales& shared) {
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
    if (threadIdx.x == 0) {
      pdl_wait();  // it is zero
      if (best > *static_cast<volatile int*>(target)) atomicMax(target, best);
    }
  }
  return scale;
}

// Codes of the patch: 8 bytes of each row and (beside) 8 more by column scales; those of columns go
// to the staged tile.
struct PatchCodes {
  uint2 row[kPatch];
  uint2 beside[kPatch];
};

__device__ __forceinline__ void put_pair(uint2& codes, int p, uint32_t pair) {
  uint32_t& word = p < 2 ? codes.x : codes.y;
  word = p % 2 ? word | pair << 16 : pair;
}

template <typename T, typename Format, BlockKind kind>
__device__ __forceinline__ void convert(const Patch<T>& patch, const PatchFactors& factors,
                                        const PatchPlace& at, bool by_rows, bool by_columns,
                                        uint8_t* tile, PatchCodes& codes) {
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
    const auto pair = [&](int i, bool by_row) {
      return encode_pair<Format>(times(v[i].x, i, 2 * p, by_row),
                                 times(v[i].y, i, 2 * p + 1, by_row));
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
      put_pair(codes.row[i], p, pair(i, kBothSides<kind>));
      if constexpr (kind == BlockKind::beside) put_pair(codes.beside[i], p, pair(i, false));
    }
  }
}

// Rows of codes leave from registers, or, where they allow no 8-byte store, by shared memory.
__device__ __forceinline__ void store_rows(const BlockArgs& a, const TilePlace& tile,
                                           const PatchPlace& at, const uint2 (&codes)[kPatch],
                                           uint8_t* out, bool wide, uint8_t* staging) {
  out += tile.m * a.cols + tile.k;
  const int height = static_cast<int>(min(a.rows - tile.m, int64_t{kTileRows}));
  const int width = static_cast<int>(min(a.cols - tile.k, int64_t{kTileCols}));
  if (wide) {
    if (at.col >= width) return;
    out += at.row * a.cols + at.col;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      if (at.row + i < height) *reinterpret_cast<uint2*>(out + i * a.cols) = codes[i];
    }
    return;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    *reinterpret_cast<uint2*>(staging + staged(at.row + i, at.col)) = codes[i];
  }
  __syncthreads();
  copy_staged(staging, out, a.cols, height, width, false);
}

template <typename T, typename Format, BlockKind kind>
__global__ void __launch_bounds__(kTileThreads, kResident<T, kind>)
    quantize_tile(const __grid_constant__ BlockArgs a, uint32_t tiles_k, bool wide, bool wide_t) {
  __shared__ __align__(16) uint8_t staging[kTileCols * kLineBytes];
  __shared__ __align__(16) TileScales shared;
  // A pass before this one left the end of x in the L2 cache: walk backwards.
  const uint32_t index = a.current != nullptr ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t tile_m = index / tiles_k;
  const int64_t tile_k = index % tiles_k;
  const TilePlace tile{tile_m * kTileRows, tile_k * kTileCols, index == 0};
  const PatchPlace at;
  const int64_t row = tile.m + at.row;
  const int64_t col = tile.k + at.col;
  const int rows_left = static_cast<int>(min(a.rows - row, int64_t{kPatch}));
  const int cols_left = static_cast<int>(min(a.cols - col, int64_t{kPatch}));
  const bool by_rows = kind != BlockKind::columns && a.codes != nullptr;
  const bool by_columns = kind != BlockKind::beside && a.codes_t != nullptr;
  pdl_trigger();  // spread_scales, if it follows, waits for all of this
  Patch<T> patch;
  patch.load(static_cast<const T*>(a.x) + row * a.stride + col, a.stride, rows_left, cols_left,
             wide);
  PatchFactors factors;
  if constexpr (kind != BlockKind::one) {
    line_factors<T, Format, kind>(a, tile, at, patch, shared, factors);
  } else if (a.scale_inv != nullptr) {
    factors.row[0] = whole_factor<T, Format>(a, tile, patch, shared);
  } else {
    factors.row[0] = square_factor<T, Format>(a, at, patch, shared);
  }
  PatchCodes codes;
  convert<T, Format, kind>(patch, factors, at, by_rows, by_columns, staging, codes);
  if (by_rows && wide) store_rows(a, tile, at, codes.row, a.codes, true, staging);
  if (kind == BlockKind::beside && wide) {
    store_rows(a, tile, at, codes.beside, a.codes_m, true, staging);
  }
  __syncthreads();
  if (by_columns) {
    copy_staged(staging, a.codes_t + tile.k * a.rows + tile.m, a.rows,
                static_cast<int>(min(a.cols - tile.k, int64_t{kTileCols})),
                static_cast<int>(min(a.rows - tile.m, int64_t{kTileRows})), wide_t);
  }
  if constexpr (kind != BlockKind::one) {
    store_lines(a, tile, shared);
  } else if (a.scale_inv == nullptr) {
    store_squares(a, tile, shared);
  }
  if (wide) return;
  if (by_rows) store_rows(a, tile, at, codes.row, a.codes, false, staging);
  if (kind == BlockKind::beside) store_rows(a, tile, at, codes.beside, a.codes_m, false, staging);
}

template <typename T, typename Format, BlockKind kind>
void launch_tiles(const BlockArgs& a, Target target) {
  const int64_t tiles_m = std::max<int64_t>(1, (a.rows + kTileRows - 1) / kTileRows);
  const int64_t tiles_k = std::max<int64_t>(1, (a.cols + kTileCols - 1) / kTileCols);
  IXT_CHECK(tiles_m * tiles_k <= 0x7FFFFFFF, "`x` must have at most 2**45 elements, got ",
            a.rows * a.cols);
  const bool wide =
      aligned16(a.x) && (a.stride * sizeof(T) % 16 == 0 || a.rows <= 1) && a.cols % kPatch == 0;
  const bool wide_t = a.rows % 16 == 0;
  auto* kernel = quantize_tile<T, Format, kind>;
  const bool waits = a.current != nullptr || a.amax != nullptr;  // for the kernel before
  const bool overlap = waits && can_overlap(target.device, kernel);
  launch(kernel, tiles_m * tiles_k, kTileThreads, target.stream, overlap, a, tiles_k, wide, wide_t);
}

}  // namespace

void launch_block_tiles(const BlockArgs& args, BlockKind kind, Float in, Fp8 out, Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    switch (kind) {
      case BlockKind::lines:
        return launch_tiles<T, Format, BlockKind::lines>(args, target);
      case BlockKind::beside:
        return launch_tiles<T, Format, BlockKind::beside>(args, target);
      case BlockKind::columns:
        return launch_tiles<T, Format, BlockKind::columns>(args, target);
      case BlockKind::crossed:
        return launch_tiles<T, Format, BlockKind::crossed>(args, target);
      case BlockKind::one:
        return launch_tiles<T, Format, BlockKind::one>(args, target);
    }
  });
}

}  // namespace ixt
