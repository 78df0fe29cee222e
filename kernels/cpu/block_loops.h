// Inner loops of the kernels that scale blocks of a matrix; compiled once per instruction set.
//
// A tile is a rectangle of a matrix whose rows are contiguous; strides count elements. "Groups"
// are runs of 32, 64 or 128 columns of a row (the last one of a row may be shorter).
#pragma once

#include <cstdint>

#include "../common/fp8.h"

namespace ixt {

template <typename Data>
struct TileOf {
  Data* data;
  int64_t stride;  // from a row to the next
  int64_t rows;
  int64_t cols;
};

using Tile = TileOf<const void>;        // words of the dtype that the loops are for
using WordsOut = TileOf<void>;
using CodesIn = TileOf<const uint8_t>;
using CodesOut = TileOf<uint8_t>;  // rows and cols unused: those of the input

// For one input or output dtype; `format` is 0 for e4m3fn and 1 for e5m2. Amax skips NaN.
struct BlockLoops {
  // amax[c], over the rows of the tile
  void (*amax_columns)(const Tile& x, float* amax);
  // amax[r * step + g]
  void (*amax_groups)(const Tile& x, int64_t group, float* amax, int64_t step);
  // q = sat(x * scale[c])
  void (*quantize_columns[2])(const Tile& x, const float* scale, uint8_t* q, int64_t q_stride);
  // q = sat(x * scale[r * step + g])
  void (*quantize_groups[2])(const Tile& x, int64_t group, const float* scale, int64_t step,
                             uint8_t* q, int64_t q_stride);
  // y = cast(q * scale[c])
  void (*dequantize_columns[2])(const CodesIn& q, const float* scale, void* y, int64_t y_stride);
  // y = cast(q * scale[r * step + g])
  void (*dequantize_groups[2])(const CodesIn& q, int64_t group, const float* scale, int64_t step,
                               void* y, int64_t y_stride);
};

struct BlockLoopTable {
  BlockLoops f32;
  BlockLoops f16;
  BlockLoops bf16;
  // From amaxes to what elements are multiplied by and what is stored: 1 / scale or e8m0.
  void (*fp8_scales[2])(const float* amax, int64_t n, const ScaleRule& rule, float* scale,
                        float* scale_inv);
  void (*mx_scales[2])(const float* amax, int64_t n, bool ceil, float* scale, uint8_t* stored);
  // out[c * out_stride + r] = in[r * in_stride + c]
  void (*transpose)(const CodesIn& in, uint8_t* out, int64_t out_stride);
};

const BlockLoopTable* block_loops_baseline();
const BlockLoopTable* block_loops_v3();
const BlockLoopTable* block_loops_v4();

}  // namespace ixt
