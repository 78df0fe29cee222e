// NVFP4 along the columns of x, with or without the rows from the same tile.
//
// A block takes 64 rows and 128 columns. Row blocks go to lanes as in nvfp4_rows.cu; a column block
// of two columns goes to a thread, whose loads find the tile in the L1 cache if the rows came first.
// What the columns give is gathered in shared memory, so that 32 neighbouring bytes are written.
#pragma once

#include "nvfp4_device.cuh"

namespace ixt {

enum class Fp4Mode { vectors, hadamard, square };

constexpr int kTileRows = 64;
constexpr int kTileCols = 128;
constexpr int kTileThreads = 256;
constexpr int kTileDepth = kTileRows / 16;    // blocks of a column
constexpr int kTilePairs = kTileCols / 2;     // pairs of columns
constexpr int kTileWidth = kTileCols / 16;    // blocks of a row
constexpr int kStagePitch = kTileDepth + 1;   // spreads the columns over the banks

struct Fp4Tile {
  Fp4Shared rows;
  Fp4Shared columns;
  uint2 codes[kTileCols][kStagePitch];
  uint8_t scales[kTileCols][kTileDepth];
};

// What all blocks share: two threads compute it for the others.
__device__ __forceinline__ void share_scales(Fp4Tile& tile, const Fp4Result* rows,
                                             const Fp4Result& columns, const int64_t* rng) {
  if (threadIdx.x == 0) tile.columns = fp4_shared(columns, rng, 1);
  if (rows != nullptr && threadIdx.x == kWarp) tile.rows = fp4_shared(*rows, rng, 0);
  __syncthreads();
}

// 16 rows of two columns, as two blocks; elements that are not there are zeros.
template <typename T>
__device__ __forceinline__ void load_columns(const Fp4Source& x, uint32_t row, uint32_t col,
                                             Block16<T> (&out)[2]) {
  const T* p = static_cast<const T*>(x.x) + row * x.stride + col;
  const bool pair = col + 1 < x.cols;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const auto* words = reinterpret_cast<const uint32_t*>(p + i * x.stride);
      if (x.wide && pair) {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(words));
        out[0].word[i] = both.x;
        out[1].word[i] = both.y;
      } else {
        out[0].word[i] = __ldg(words);
        out[1].word[i] = pair ? __ldg(words + 1) : 0;
      }
    }
  } else {
    uint32_t words[16];
    if (x.wide && pair) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        words[i] = __ldg(reinterpret_cast<const uint32_t*>(p + i * x.stride));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const auto* halves = reinterpret_cast<const uint16_t*>(p + i * x.stride);
        words[i] = __ldg(halves) | (pair ? static_cast<uint32_t>(__ldg(halves + 1)) << 16 : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[0].word[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
      out[1].word[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
    }
  }
}

// Two rows of a block a lane, four blocks side by side a warp.
template <typename T, bool Square>
__device__ __forceinline__ void tile_rows(const Fp4Source& x, const Fp4Result& y, Fp4Tile& tile,
                                          const Fp4Result& columns, const int64_t* rng,
                                          uint32_t first_row, uint32_t first_col) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t row = first_row + warp / 2 * 16 + lane / 4 * 2;
  const uint32_t col = first_col / 16 + warp % 2 * 4 + lane % 4;
  Block16<T> block[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    block[i].clear();
    if (row + i < y.rows && col < y.blocks) {
      block[i].load(static_cast<const T*>(x.x) + (row + i) * x.stride + col * kFp4Block, x.wide);
    }
  }
  share_scales(tile, &y, columns, rng);  // the loads are on their way
  float amax[2] = {block[0].amax(), block[1].amax()};
  if constexpr (Square) {
    amax[0] = fmaxf(amax[0], amax[1]);
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) {
      amax[0] = fmaxf(amax[0], __shfl_xor_sync(0xFFFFFFFFu, amax[0], step));
    }
    amax[1] = amax[0];
  }
  uint32_t code[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= y.rows || col >= y.blocks) break;
    const Fp4Scale scale(amax[i], global_of(y, tile.rows, row + i));
    const uint64_t index = y.index(row + i, col);
    code[i] = scale.code;
    reinterpret_cast<uint2*>(y.codes)[index] =
        quantize16(block[i], scale.multiplier, rng != nullptr, tile.rows.key, index);
    if (!y.gemm && !Square) y.scales[index] = static_cast<uint8_t>(scale.code);
  }
  if (y.gemm) {  // two of four lanes write the scales of four blocks
    const uint32_t upper = gather4(code[0]);
    const uint32_t lower = gather4(code[1]);
    const uint32_t at = row + lane % 4;
    if (lane % 4 < 2 && at < y.scale_rows && col < y.scale_cols) {
      *reinterpret_cast<uint32_t*>(y.scales + y.scale_index(at, col & ~3u)) =
          lane % 4 == 0 ? upper : lower;
    }
  } else if (Square && lane < 4 && row < y.rows && col < y.blocks) {
    y.scales[y.index(row / 16, col)] = static_cast<uint8_t>(code[0]);
  }
}

// One block of two columns a thread; the result stays in the tile.
template <typename T, Fp4Mode Mode, bool Rows>
__device__ __forceinline__ void tile_columns(const Fp4Source& x, const Fp4Result& y, Fp4Tile& tile,
                                             const int64_t* rng, uint32_t first_row,
                                             uint32_t first_col) {
  const uint32_t pair = threadIdx.x % kTilePairs;
  const uint32_t depth = threadIdx.x / kTilePairs;
  const uint32_t row = first_col + 2 * pair;  // of the result
  const uint32_t col = first_row / 16 + depth;
  Block16<T> block[2];
  if (row < y.rows && col < y.blocks) {
    load_columns(x, col * 16, row, block);
  } else {
    block[0].clear();
    block[1].clear();
  }
  if constexpr (!Rows) share_scales(tile, nullptr, y, rng);  // the loads are on their way
  float largest = 0.0f;
  if constexpr (Mode == Fp4Mode::square) {
    largest = fmaxf(block[0].amax(), block[1].amax());
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto quantize = [&](auto values) {
      const float amax = Mode == Fp4Mode::square ? largest : values.amax();
      const Fp4Scale scale(amax, global_of(y, tile.columns, min(row + i, y.rows - 1)));
      tile.scales[2 * pair + i][depth] = static_cast<uint8_t>(scale.code);
      tile.codes[2 * pair + i][depth] = quantize16(values, scale.multiplier, rng != nullptr,
                                                   tile.columns.key, y.index(row + i, col));
    };
    if constexpr (Mode == Fp4Mode::hadamard) {
      quantize(hadamard(block[i]));
    } else {
      quantize(block[i]);
    }
  }
}

// Write the columns of the tile: four neighbouring threads write the 32 bytes of a column.
template <bool Square>
__device__ __forceinline__ void store_columns(const Fp4Result& y, const Fp4Tile& tile,
                                              uint32_t first_row, uint32_t first_col) {
  constexpr uint32_t kUnits = kTileCols * kTileDepth;
#pragma unroll
  for (uint32_t unit = threadIdx.x; unit < kUnits; unit += kTileThreads) {
    const uint32_t row = first_col + unit / kTileDepth;
    const uint32_t depth = unit % kTileDepth;
    const uint32_t col = first_row / 16 + depth;
    const bool real = row < y.rows && col < y.blocks;
    if (real) {
      reinterpret_cast<uint2*>(y.codes)[y.index(row, col)] =
          tile.codes[unit / kTileDepth][depth];
    }
    const uint8_t scale = real ? tile.scales[unit / kTileDepth][depth] : 0;
    if (y.gemm) {
      if (row < y.scale_rows && col < y.scale_cols) y.scales[y.scale_index(row, col)] = scale;
    } else if (real && (!Square || row % 16 == 0)) {
      y.scales[y.index(Square ? row / 16 : row, col)] = scale;
    }
  }
}

template <typename T, Fp4Mode Mode, bool Rows>
__global__ void __launch_bounds__(kTileThreads)
    fp4_tile(const __grid_constant__ Fp4Source x, const __grid_constant__ Fp4Result rows,
             const __grid_constant__ Fp4Result columns, const int64_t* rng,
             const __grid_constant__ Divider by_tiles, uint32_t tiles) {
  __shared__ Fp4Tile tile;
  const uint32_t tile_col = by_tiles(blockIdx.x);
  const uint32_t first_row = (blockIdx.x - tile_col * tiles) * kTileRows;
  const uint32_t first_col = tile_col * kTileCols;
  if constexpr (Rows) {
    tile_rows<T, Mode == Fp4Mode::square>(x, rows, tile, columns, rng, first_row, first_col);
  }
  tile_columns<T, Mode, Rows>(x, columns, tile, rng, first_row, first_col);
  __syncthreads();
  store_columns<Mode == Fp4Mode::square>(columns, tile, first_row, first_col);
}

// `height` and `width` of x, with the padding that scales need.
template <typename T, bool Rows>
void launch_tiles(const Fp4Source& x, const Fp4Result& rows, const Fp4Result& columns,
                  const Fp4Options& options, int64_t height, int64_t width, cudaStream_t stream) {
  const int64_t down = (height + kTileRows - 1) / kTileRows;
  const int64_t grid = down * ((width + kTileCols - 1) / kTileCols);
  const Divider by_tiles(down, grid);
  const auto kernel = options.square     ? fp4_tile<T, Fp4Mode::square, Rows>
                      : options.hadamard ? fp4_tile<T, Fp4Mode::hadamard, Rows>
                                         : fp4_tile<T, Fp4Mode::vectors, Rows>;
  launch(kernel, grid, kTileThreads, stream, false, x, rows, columns, options.rng, by_tiles,
         static_cast<uint32_t>(down));
}

}  // namespace ixt
