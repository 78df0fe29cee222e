// NVFP4 along the rows of x: a thread takes blocks of 16 elements, or 4 rows of a 16x16 block.
//
// The grid covers the padding of the GEMM's scale layout as well, whose zeros are written here.
#include "nvfp4_device.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // blocks a thread

template <typename T, bool Hadamard>
__global__ void __launch_bounds__(kThreads)
    fp4_rows(const __grid_constant__ Fp4Source x, const __grid_constant__ Fp4Result y,
             const int64_t* rng, const __grid_constant__ Divider by_width) {
  __shared__ Fp4Shared shared;
  uint32_t row[kUnroll], col[kUnroll];
  bool real[kUnroll];
  Block16<T> block[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {  // all loads before the first use
    const uint64_t at = uint64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x + i * kThreads;
    row[i] = by_width(at);
    col[i] = static_cast<uint32_t>(at) - row[i] * y.scale_cols;
    real[i] = row[i] < y.rows && col[i] < y.blocks;
    block[i].clear();
    if (real[i]) {
      block[i].load(static_cast<const T*>(x.x) + row[i] * x.stride + col[i] * kFp4Block, x.wide);
    }
  }
  if (threadIdx.x == 0) shared = fp4_shared(y, rng, 0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (row[i] >= y.scale_rows) return;
    uint32_t scale_code = 0;
    if (real[i]) {
      const uint64_t index = y.index(row[i], col[i]);
      const Fp4Global global = global_of(y, shared, row[i]);
      const auto quantize = [&](auto values) {
        const Fp4Scale scale(values.amax(), global);
        scale_code = scale.code;
        return quantize16(values, scale.multiplier, rng != nullptr, shared.key, index);
      };
      uint2 codes;
      if constexpr (Hadamard) {
        codes = quantize(hadamard(block[i]));
      } else {
        codes = quantize(block[i]);
      }
      reinterpret_cast<uint2*>(y.codes)[index] = codes;
    }
    y.scales[y.scale_index(row[i], col[i])] = static_cast<uint8_t>(scale_code);
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
    const bool real = row < y.rows && col < y.blocks;
    if (real) {
      const uint64_t index = y.index(row, col);
      reinterpret_cast<uint2*>(y.codes)[index] =
          quantize16(block[i], scale.multiplier, rng != nullptr, shared.key, index);
    }
    if (y.gemm && row < y.scale_rows && col < y.scale_cols) {
      y.scales[y.scale_index(row, col)] = static_cast<uint8_t>(real ? scale.code : 0);
    }
  }
  if (!y.gemm && lane < kTileBlocks && col < y.blocks) {
    y.scales[y.index(tile_row, col)] = static_cast<uint8_t>(scale.code);
  }
}

template <typename T>
void run(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, cudaStream_t stream) {
  if (options.square) {
    const int64_t height = y.gemm ? y.scale_rows : y.rows;
    const int64_t tile_rows = (height + kFp4Block - 1) / kFp4Block;
    const int64_t tiles = (int64_t{y.scale_cols} + kTileBlocks - 1) / kTileBlocks;
    const int64_t warps = tiles * tile_rows;
    const int64_t grid = (warps * kWarp + kSquareThreads - 1) / kSquareThreads;
    const Divider by_tiles(tiles, warps + kSquareThreads);
    launch(fp4_square_rows<T>, grid, kSquareThreads, stream, false, x, y, options.rng,
           static_cast<uint32_t>(tiles), static_cast<uint32_t>(tile_rows), by_tiles);
    return;
  }
  const int64_t count = int64_t{y.scale_rows} * y.scale_cols;
  const int64_t tile = int64_t{kThreads} * kUnroll;
  const Divider by_width(y.scale_cols, count + tile);
  launch(options.hadamard ? fp4_rows<T, true> : fp4_rows<T, false>, (count + tile - 1) / tile,
         kThreads, stream, false, x, y, options.rng, by_width);
}

}  // namespace

void launch_fp4_rows(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, Float in,
                     cudaStream_t stream) {
  if (y.scale_rows == 0 || y.scale_cols == 0) return;
  with_float<bf16, f16>(in, [&](auto t) { run<decltype(t)>(x, y, options, stream); });
}

}  // namespace ixt
