// Where the e8m0 scales of MXFP8 lie: plain, or in the swizzle of cuBLASLt's block-scaled GEMM.
#pragma once

#include "block_args.h"

namespace ixt {

inline void check_mx_block(Block block) {
  const bool ok = (block.m == 1 && block.k == 32) || (block.m == 32 && block.k == 1) ||
                  (block.m == 32 && block.k == 32);
  IXT_CHECK(ok, "`block_m` and `block_k` must be (1, 32), (32, 1) or (32, 32), got (", block.m,
            ", ", block.k, ")");
}

// The GEMM operand that the codes are: `rows`, and `cols` blocks along its contraction.
struct MxOperand {
  int64_t rows;
  int64_t cols;
  int64_t repeat;  // consecutive rows that share a scale, 32 for square blocks
  bool along_m;    // rows are columns of the matrix (M, K)

  int64_t padded_rows() const { return round_up(rows, kSwizzleRows); }
  int64_t padded_cols() const { return round_up(cols, kSwizzleCols); }
  bool padded() const { return padded_rows() != rows || padded_cols() != cols; }
};

inline MxOperand mx_operand(int64_t rows, int64_t cols, Block block, bool transposed) {
  if (block.k == 1 || (block.square() && transposed)) {
    return {cols, ceil_div(rows, block.m), block.k, true};
  }
  return {rows, ceil_div(cols, block.k), block.m, false};
}

class MxScales {
 public:
  static MxScales plain(uint8_t* data, Grid grid, bool transposed) {
    MxScales scales;
    scales.plain_ = {data, transposed ? 1 : grid.k, transposed ? grid.m : 1};
    return scales;
  }

  static MxScales swizzled(uint8_t* data, const MxOperand& operand) {
    MxScales scales;
    scales.swizzled_ = data;
    scales.operand_ = operand;
    return scales;
  }

  // Stores those of rows x cols blocks of (M, K) from (i, j) on.
  void put(int64_t i, int64_t j, int64_t rows, int64_t cols, const uint8_t* values,
           int64_t step) const {
    if (!swizzled_) return plain_.put(i, j, rows, cols, values, step);
    if (operand_.along_m) {
      for (int64_t c = 0; c < cols; ++c) put_blocks(j + c, i, rows, values + c, step);
    } else {
      for (int64_t r = 0; r < rows; ++r) put_blocks(i + r, j, cols, values + r * step, 1);
    }
  }

 private:
  // For the rows that share scales, `row` in units of them, and blocks first.. of the contraction.
  void put_blocks(int64_t row, int64_t first, int64_t count, const uint8_t* values,
                  int64_t step) const {
    const int64_t begin = row * operand_.repeat;
    const int64_t end = std::min(operand_.rows, begin + operand_.repeat);
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* base = swizzled_ + swizzled_row(r, operand_.padded_cols());
      for (int64_t b = 0; b < count; ++b) base[swizzled_col(first + b)] = values[b * step];
    }
  }

  StridedScales<uint8_t> plain_{};
  uint8_t* swizzled_ = nullptr;
  MxOperand operand_{};
};

}  // namespace ixt
