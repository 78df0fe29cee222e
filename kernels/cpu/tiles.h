// Tiles of a matrix: how the threads share it, and quantizing one tile.
#pragma once

#include <algorithm>

#include "block_args.h"
#include "block_loops.h"
#include "isa.h"

namespace ixt {

// Long enough to transpose whole cache lines, a multiple of every block, and small enough for L2.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileCols = 256;
constexpr int64_t kTileBands = kTileRows / 32;  // rows of blocks
// Tiles of kernels that need no column at once: the order of the memory.
constexpr int64_t kFlatRows = 4;
constexpr int64_t kFlatCols = 4096;
constexpr int64_t kTileGroups = 1024;  // groups of 32 in either
constexpr int64_t kThreadWorth = 32 * 1024;  // elements

inline const BlockLoopTable& block_loop_table() {
  static const BlockLoopTable* best = IXT_BEST_OF(block_loops);
  return *best;
}

struct Area {
  int64_t m;  // first row
  int64_t k;  // first column
  int64_t rows;
  int64_t cols;
};

// Runs f(area) over the tiles of a matrix, in the order of the memory.
template <typename F>
void for_tiles(int64_t rows, int64_t cols, int64_t tile_rows, int64_t tile_cols, const F& f) {
  if (rows == 0 || cols == 0) return;
  const int64_t across = ceil_div(cols, tile_cols);
  const int64_t count = ceil_div(rows, tile_rows) * across;
  const int64_t size = std::min(rows, tile_rows) * std::min(cols, tile_cols);
  const int64_t grain = std::max<int64_t>(1, kThreadWorth / size);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t m = t / across * tile_rows;
      const int64_t k = t % across * tile_cols;
      f(Area{m, k, std::min(tile_rows, rows - m), std::min(tile_cols, cols - k)});
    }
  });
}

template <typename F>
void for_tall_tiles(int64_t rows, int64_t cols, const F& f) {
  for_tiles(rows, cols, kTileRows, kTileCols, f);
}

template <typename F>
void for_flat_tiles(int64_t rows, int64_t cols, const F& f) {
  for_tiles(rows, cols, kFlatRows, kFlatCols, f);
}

// The elements of a matrix that lie under an area.
class Matrix {
 public:
  Matrix(const Rows& x, Float dtype)
      : data_(static_cast<const char*>(x.tensor.const_data_ptr())),
        stride_(x.stride),
        dtype_(dtype) {}

  Float dtype() const { return dtype_; }

  Tile tile(const Area& a) const {
    return {data_ + (a.m * stride_ + a.k) * item_size(dtype_), stride_, a.rows, a.cols};
  }

 private:
  const char* data_;
  int64_t stride_;
  Float dtype_;
};

// Where codes go: to (M, K), to its transpose (K, M), or to both; null for what is not wanted.
struct CodesTo {
  uint8_t* plain;
  uint8_t* transposed;
  int64_t rows;  // M
  int64_t cols;  // K
};

// Runs write(codes, stride) for the codes of an area, and transposes them if that is wanted.
template <typename F>
void write_codes(const CodesTo& to, const Area& a, const F& write) {
  alignas(64) uint8_t scratch[kTileRows * kTileCols];
  uint8_t* codes = to.plain ? to.plain + a.m * to.cols + a.k : scratch;
  const int64_t stride = to.plain ? to.cols : kTileCols;
  write(codes, stride);
  if (to.transposed) {
    block_loop_table().transpose({codes, stride, a.rows, a.cols},
                                 to.transposed + a.k * to.rows + a.m, to.rows);
  }
}

}  // namespace ixt
