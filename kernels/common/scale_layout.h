// Where the block-scaled GEMM of cuBLASLt expects the one-byte scales of MXFP8 and NVFP4.
#pragma once

#include "fp8.h"

namespace ixt {

constexpr int64_t kSwizzleRows = 128;
constexpr int64_t kSwizzleCols = 4;

IXT_HD int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Byte of the scale of row `r` and block `c`. `cols` is the number of blocks in a row, rounded up
// to 4. Tiles of 128 x 4 lie in row-block-major order; the padding must be written as zeros.
IXT_HD int64_t swizzled(int64_t r, int64_t c, int64_t cols) {
  const int64_t tile = (r / kSwizzleRows) * (cols / kSwizzleCols) + c / kSwizzleCols;
  return tile * (kSwizzleRows * kSwizzleCols) + (r % 32) * 16 + (r % kSwizzleRows) / 32 * 4 +
         c % kSwizzleCols;
}

}  // namespace ixt
