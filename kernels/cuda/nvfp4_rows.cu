// NVFP4 along the rows of x.
//
// A thread takes four blocks of 16 elements below each other: the scales and random keys that all
// blocks share are computed once for 64 elements. The grid covers the padding of the GEMM's scale
// layout as well, whose zeros are written here.
#include "nvfp4_device.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 4;      // blocks of a thread
constexpr int kRowStep = 32;    // rows from one to the next: their scales are 4 bytes of the GEMM's
constexpr int kRowGroup = 128;  // order, whose tiles have 128 rows

// Warps go along the rows first. A warp takes 2^log_lanes blocks side by side; there are as many
// warps in a group of 128 rows as that, and `tiles` in a row.
struct RowGrid {
  uint32_t warps_down;
  uint32_t tiles;
  int log_lanes;
  Divider by_tiles;
};

template <typename T, bool Hadamard>
__global__ void __launch_bounds__(kThreads)
    fp4_rows(const __grid_constant__ Fp4Source x, const __grid_constant__ Fp4Result y,
             const int64_t* rng, const __grid_constant__ RowGrid grid) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t warp = uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const uint32_t down = grid.by_tiles(warp);
  if (down >= grid.warps_down) return;  // a whole warp
  const uint32_t lanes = 1u << grid.log_lanes;
  const uint32_t tile = static_cast<uint32_t>(warp) - down * grid.tiles;
  const uint32_t col = (tile << grid.log_lanes) + (lane & (lanes - 1));
  const uint32_t within = ((down & (lanes - 1)) << (5 - grid.log_lanes)) + (lane >> grid.log_lanes);
  const uint32_t first = (down >> grid.log_lanes) * kRowGroup + within;
  Block16<T> block[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {  // all loads before the first use
    const uint32_t row = first + i * kRowStep;
    block[i].clear();
    if (row < y.rows && col < y.blocks) {
      block[i].load(static_cast<const T*>(x.x) + row * x.stride + col * kFp4Block, x.wide);
    }
  }
  const Fp4Shared shared = fp4_shared(y, rng, 0);
  uint32_t scales = 0;  // a byte for each block
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint32_t row = first + i * kRowStep;
    if (row >= y.rows || col >= y.blocks) break;
    const uint64_t index = y.index(row, col);
    const auto quantize = [&](auto values) {
      const Fp4Scale scale(values.amax(), global_of(y, shared, row));
      scales |= scale.code << (8 * i);
      reinterpret_cast<uint2*>(y.codes)[index] =
          quantize16(values, scale.multiplier, rng != nullptr, shared.key, index);
      if (!y.gemm) y.scales[index] = static_cast<uint8_t>(scale.code);
    };
    if constexpr (Hadamard) {
      quantize(hadamard(block[i]));
    } else {
      quantize(block[i]);
    }
  }
  if (y.gemm) {  // four lanes have 16 neighbouring bytes
    const uint32_t word = transpose4(scales);
    if (col < y.scale_cols) {
      const uint64_t at = y.scale_index(first + lane % 4 * kRowStep, col & ~3u);
      *reinterpret_cast<uint32_t*>(y.scales + at) = word;
    }
  }
}

constexpr int kTileBlocks = 8;  // 16x16 blocks that a warp takes, side by side
constexpr int kLaneRows = 4;    // rows of one of them that a lane takes
constexpr int kSquareThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kSquareThreads)
    fp4_square_rows(const __grid_constant__ Fp4Source x, const __grid_constant__ Fp4Result y,
                    const int64_t* rng, uint32_t tiles, uint32_t tile_rows,
                    const __grid_constant__ Divider by_tiles) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t warp = uint64_t{blockIdx.x} * (kSquareThreads / kWarp) + threadIdx.x / kWarp;
  const uint32_t tile_row = by_tiles(warp);
  if (tile_row >= tile_rows) return;  // a whole warp
  const uint32_t tile = static_cast<uint32_t>(warp) - tile_row * tiles;
  const uint32_t col = tile * kTileBlocks + lane % kTileBlocks;
  const uint32_t first = tile_row * kFp4Block + lane / kTileBlocks * kLaneRows;
  Block16<T> block[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    block[i].clear();
    if (first + i < y.rows && col < y.blocks) {
      block[i].load(static_cast<const T*>(x.x) + (first + i) * x.stride + col * kFp4Block,
                    x.wide);
    }
  }
  const Fp4Shared shared = fp4_shared(y, rng, 0);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) amax = fmaxf(amax, block[i].amax());
#pragma unroll
  for (int step = kTileBlocks; step < kWarp; step *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  }
  const Fp4Scale scale(amax, shared.whole);
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const uint32_t row = first + i;
    if (row < y.rows && col < y.blocks) {
      const uint64_t index = y.index(row, col);
      reinterpret_cast<uint2*>(y.codes)[index] =
          quantize16(block[i], scale.multiplier, rng != nullptr, shared.key, index);
    }
  }
  if (y.gemm) {  // a lane writes the scales of four blocks in one of its rows
    const uint32_t word = gather4(col < y.blocks ? scale.code : 0);
    const uint32_t row = first + lane % 4;
    if (row < y.scale_rows && col < y.scale_cols) {
      *reinterpret_cast<uint32_t*>(y.scales + y.scale_index(row, col & ~3u)) =
          row < y.rows ? word : 0;
    }
  }
  if (!y.gemm && lane < kTileBlocks && col < y.blocks) {
    y.scales[y.index(tile_row, col)] = static_cast<uint8_t>(scale.code);
  }
}

template <typename T>
void run_squares(const Fp4Source& x, const Fp4Result& y, const int64_t* rng, cudaStream_t stream) {
  const int64_t height = y.gemm ? y.scale_rows : y.rows;
  const int64_t tile_rows = (height + kFp4Block - 1) / kFp4Block;
  const int64_t tiles = (int64_t{y.scale_cols} + kTileBlocks - 1) / kTileBlocks;
  const int64_t warps = tiles * tile_rows;
  const int64_t grid = (warps * kWarp + kSquareThreads - 1) / kSquareThreads;
  const Divider by_tiles(tiles, warps + kSquareThreads);
  launch(fp4_square_rows<T>, grid, kSquareThreads, stream, false, x, y, rng,
         static_cast<uint32_t>(tiles), static_cast<uint32_t>(tile_rows), by_tiles);
}

template <typename T>
void run(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, cudaStream_t stream) {
  if (options.square) return run_squares<T>(x, y, options.rng, stream);
  const uint32_t most = y.gemm ? 8 : kWarp;
  int log_lanes = y.gemm ? 2 : 0;
  while ((1u << log_lanes) < most && (1u << log_lanes) < y.scale_cols) ++log_lanes;
  const int64_t lanes = int64_t{1} << log_lanes;
  const int64_t tiles = (y.scale_cols + lanes - 1) / lanes;
  const int64_t down = (int64_t{y.scale_rows} + kRowGroup - 1) / kRowGroup * lanes;
  const int64_t warps = down * tiles;
  const RowGrid grid{static_cast<uint32_t>(down), static_cast<uint32_t>(tiles), log_lanes,
                     Divider(tiles, warps + kThreads)};
  launch(options.hadamard ? fp4_rows<T, true> : fp4_rows<T, false>,
         (warps * kWarp + kThreads - 1) / kThreads, kThreads, stream, false, x, y, options.rng,
         grid);
}

}  // namespace

void launch_fp4_rows(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, Float in,
                     cudaStream_t stream) {
  if (y.scale_rows == 0 || y.scale_cols == 0) return;
  with_float<bf16, f16>(in, [&](auto t) { run<decltype(t)>(x, y, options, stream); });
}

}  // namespace ixt
