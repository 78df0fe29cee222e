// Launchers of the block-scaled kernels: FP8 blocks, MXFP8, and both orientations of one scale.
//
// Two sides share one description. Side 0 scales rows: a line is a row of x, and blocks count along
// it. Side 1 scales columns: a line is a column of x. A scale of a square block belongs to either.
#pragma once

#include "fp8_launch.h"

namespace ixt {

enum class ScaleForm : int {
  fp32,      // 1 / scale
  e8m0,      // one byte
  spread,    // fp32 for launch_spread_scales: those of neighbouring lines lie side by side
  stacked,   // the same of e8m0, four blocks a word
  swizzled,  // one byte, where common/scale_layout.h says
};

// Where scales go to or come from. data == nullptr: this side is not wanted.
struct ScaleView {
  void* data;
  ScaleForm form;
  int64_t lines;    // lines and blocks that hold a scale
  int64_t blocks;
  int64_t line;     // elements from a line to the next
  int64_t block;    // elements from a block to the next
  int64_t padding;  // fp32: zeros to write behind the last block of a line
};

// How a factor follows from an amax.
struct BlockRule {
  ScaleRule fp8;
  bool mx;     // e8m0 instead of fp32
  bool floor;  // e8m0: OCP's rule
};

enum class BlockKind : int {
  lines,    // codes by row scales and codes_t by column scales
  beside,   // codes by row scales and codes_m by column scales
  columns,  // codes_t by column scales
  crossed,  // codes by column scales, or codes_t by row scales
  one,      // one scale a square block, or for all of x
};

struct BlockArgs {
  const void* x;
  int64_t rows;
  int64_t cols;
  int64_t stride;    // elements between rows of x
  uint8_t* codes;    // (rows, cols), or nullptr
  uint8_t* codes_t;  // (cols, rows), or nullptr
  uint8_t* codes_m;  // (rows, cols), or nullptr
  ScaleView side[2];
  BlockRule rule;
  int group;              // elements along a block: 32, 64 or 128
  const float* columns;   // columns, crossed: the amax of each, which the pass before found
  const float* scale;     // one: the scale is given,
  const float* current;   // or follows from this amax, which the kernel before this one found;
  float* scale_inv;       // both write it here
  float* amax;            // one, given: raised to the amax of x
};

// Any orientation that crosses rows. `x` is read once.
void launch_block_tiles(const BlockArgs& args, BlockKind kind, Float in, Fp8 out, Target target);

// Words of scales, (words, lines), to be transposed.
struct SpreadMatrix {
  const uint32_t* from;
  uint32_t* to;
  int64_t lines;
  int64_t words;
};
struct SpreadArgs {
  SpreadMatrix matrix[2];  // either may be empty
};

// The second step of launch_block_tiles where scales were written side by side.
void launch_spread_scales(const SpreadArgs& args, Target target);

// codes by row scales only.
void launch_block_rows(const BlockArgs& args, Float in, Fp8 out, Target target);

// amax[k] = largest magnitude of column k; NaN ignored.
void launch_column_amax(const void* x, int64_t rows, int64_t cols, int64_t stride, float* amax,
                        Float in, Target target);

// Codes of (rows, cols) in blocks of (block_m, block_k); each is 1 or a power of two from 8 on.
struct DequantizeArgs {
  const uint8_t* codes;
  ScaleView scales;
  void* y;
  int64_t rows;
  int64_t cols;
  int block_m;
  int block_k;
  bool lines_are_columns;  // a line of `scales` is a column of the codes, not a row of blocks
  int line_step;           // lines that a row of blocks has in `scales`
};

void launch_block_dequantize(const DequantizeArgs& args, Fp8 in, Float out, Target target);

}  // namespace ixt
