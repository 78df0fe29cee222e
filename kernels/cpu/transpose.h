// Transposes bytes. For files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "block_loops.h"

namespace ixt {
namespace {

constexpr int64_t kStripCols = 64;   // eight words of eight bytes: one AVX-512 register
constexpr int64_t kStripRows = 128;  // what is gathered before it is stored

// 64 bytes of a row as eight words; on smaller machines the compiler uses several registers.
typedef uint64_t Words __attribute__((vector_size(64)));

// Swaps the blocks of `Bytes` x `Bytes` bytes that lie across the diagonal of squares of 8 x 8
// bytes; word j of each row belongs to the j-th square.
template <int Bytes>
IXT_HD void swap_blocks(Words (&rows)[8]) {
  constexpr uint64_t mask = Bytes == 4   ? 0x00000000FFFFFFFFu
                            : Bytes == 2 ? 0x0000FFFF0000FFFFu
                                         : 0x00FF00FF00FF00FFu;
  for (int i = 0; i < 8; ++i) {
    if (i & Bytes) continue;
    Words& upper = rows[i];
    Words& lower = rows[i + Bytes];
    const Words changed = ((upper >> (8 * Bytes)) ^ lower) & mask;
    upper ^= changed << (8 * Bytes);
    lower ^= changed;
  }
}

// Eight rows of 64 bytes: out[c * stride + r] = rows[r][c], for all 64 columns.
IXT_HD void transpose_8x64(Words (&rows)[8], uint8_t* out, int64_t stride) {
  swap_blocks<4>(rows);
  swap_blocks<2>(rows);
  swap_blocks<1>(rows);
  for (int i = 0; i < 8; ++i) {
    alignas(64) uint64_t words[8];
    memcpy(words, &rows[i], sizeof(words));
    for (int j = 0; j < 8; ++j) memcpy(out + (8 * j + i) * stride, &words[j], 8);
  }
}

// At most 128 x 64, through a buffer: the rows of `out` tend to lie a power of two apart, in the
// same few sets of the cache, and would evict each other if they were written 8 bytes at a time.
void transpose_strip(const uint8_t* in, int64_t in_stride, int64_t rows, int64_t cols,
                            uint8_t* out, int64_t out_stride) {
  alignas(64) uint8_t buffer[kStripCols][kStripRows];
  for (int64_t r = 0; r < rows; r += 8) {
    Words words[8] = {};
    if (r + 8 <= rows && cols == kStripCols) {
      for (int64_t i = 0; i < 8; ++i) memcpy(&words[i], in + (r + i) * in_stride, kStripCols);
    } else {
      const int64_t count = rows - r < 8 ? rows - r : 8;
      for (int64_t i = 0; i < count; ++i) memcpy(&words[i], in + (r + i) * in_stride, cols);
    }
    transpose_8x64(words, &buffer[0][r], kStripRows);
  }
  if (rows == kStripRows) {
    for (int64_t c = 0; c < cols; ++c) memcpy(out + c * out_stride, buffer[c], kStripRows);
  } else {
    for (int64_t c = 0; c < cols; ++c) memcpy(out + c * out_stride, buffer[c], rows);
  }
}

void transpose_bytes(const CodesIn& in, uint8_t* out, int64_t out_stride) {
  for (int64_t r = 0; r < in.rows; r += kStripRows) {
    const int64_t rows = in.rows - r < kStripRows ? in.rows - r : kStripRows;
    for (int64_t c = 0; c < in.cols; c += kStripCols) {
      const int64_t cols = in.cols - c < kStripCols ? in.cols - c : kStripCols;
      transpose_strip(in.data + r * in.stride + c, in.stride, rows, cols, out + c * out_stride + r,
                      out_stride);
    }
  }
}

}  // namespace
}  // namespace ixt
