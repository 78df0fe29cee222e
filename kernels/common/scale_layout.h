// Where the block-scaled GEMM of cuBLASLt expects the one-byte scales of MXFP8 and NVFP4.
#pragma once

#include "fp8.h"

namespace ixt {

constexpr uint64_t kSwizzleRows = 128;
constexpr uint64_t kSwizzleCols = 4;

IXT_HD int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Byte of the scale of row `r` and block `c`: swizzled_row + swizzled_col. `cols` is the number of
// blocks in a row, rounded up to 4. Tiles of 128 x 4 lie in row-block-major order; the padding must
// be written as zeros. Unsigned, so that divisions are shifts.
IXT_HD int64_t swizzled_row(uint64_t r, uint64_t cols) {
  return r / kSwizzleRows * (kSwizzleRows * cols) + r % 32 * 16 + r % kSwizzleRows / 32 * 4;
}

IXT_HD int64_t swizzled_col(uint64_t c) {
  return c / kSwizzleCols * (kSwizzleRows * kSwizzleCols) + c % kSwizzleCols;
}

IXT_HD int64_t swizzled(int64_t r, int64_t c, int64_t cols) {
  return swizzled_row(r, cols) + swizzled_col(c);
}

}  // namespace ixt
