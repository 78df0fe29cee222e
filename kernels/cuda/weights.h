// Products with quantized weights for few rows of x: what the op hands to the kernels.
//
// y (m, n) = x (m, k) @ W^T for m <= 16; weights.cu holds the op, weights.cuh the kernel.
#pragma once

#include "fp8_launch.h"

namespace ixt {

constexpr int kMostRows = 16;

enum class Code { int8, e4m3, e5m2, int4, e2m1 };

struct DecodeArgs {
  const void* x;          // (m, k)
  const uint8_t* codes;   // (n, k) or (n, k / 2)
  const float* scale;     // one a group, or null
  const uint8_t* packed;  // a byte a group: e8m0 scales, e4m3 scales (e2m1), zero points (int4)
  const float* last;      // what a row's sum is multiplied by: one, or n; or null
  const void* bias;       // n numbers like x, or null
  void* y;                // (m, n)
  int m, n, k;
  int packed_bytes;
  int group_shift, row_shift;  // log2 of the elements and of the rows that share a scale
  int groups;                  // a row
  bool last_per_row;

  // How the work is cut, by plan() in weights_launch.cuh.
  int tiles;                // of 16 rows of W
  int pass_tiles;           // at most, of a block at a time
  int stages;               // of the ring of a warp
  int stage_bytes;          // of which the groups' numbers begin at
  int scale_at, packed_at;
  int entries;              // numbers a row of W has in a stage, one for
  int entry_shift;          // 1 << entry_shift units
};

// One for each code; T is the dtype of x.
void launch_decode_int8(DecodeArgs args, Float x, Target target);
void launch_decode_e4m3(DecodeArgs args, Float x, Target target);
void launch_decode_e5m2(DecodeArgs args, Float x, Target target);
void launch_decode_int4(DecodeArgs args, Float x, Target target);
void launch_decode_e2m1(DecodeArgs args, Float x, Target target);

}  // namespace ixt
