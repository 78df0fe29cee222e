// Inner loops of the NVFP4 CPU kernels. nvfp4_loops.cpp is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "../common/philox.h"

namespace ixt {

// A strip is up to 64 blocks of 16 elements, element i of block w at [i][w]: the compiler
// vectorizes over the blocks, whichever way they lie in the tensor.
constexpr int64_t kStrip = 64;
using Fp4Elements = float[16][kStrip];

// What the blocks of a strip are quantized with, one entry a block.
struct Fp4Strip {
  float encode_sixth[kStrip];
  float decode[kStrip];
  float amax[kStrip];
  float multiplier[kStrip];
  uint8_t scale[kStrip];
  uint32_t random[4][kStrip];
  uint32_t codes[2][kStrip];  // elements 0 to 7 and 8 to 15, element 0 in the lowest bits
};

struct Fp4TypedLoops {
  // `n` blocks that lie one after the other.
  void (*load_rows)(const void* x, int64_t n, Fp4Elements& out);
  // `n` columns of 16 rows.
  void (*load_columns)(const void* x, int64_t stride, int64_t n, Fp4Elements& out);
  // `n` blocks of 8 bytes, times a factor each.
  void (*dequantize)(const uint8_t* codes, const float* factor, int64_t n, void* y);
};

struct Fp4Loops {
  Fp4TypedLoops f32;
  Fp4TypedLoops f16;
  Fp4TypedLoops bf16;
  void (*hadamard)(Fp4Elements& a, int64_t n);
  void (*raise_amax)(const Fp4Elements& a, int64_t n, float* amax);
  void (*scales)(Fp4Strip& strip, int64_t n);
  // Bits of the blocks first, first + step, ...
  void (*random)(Fp4Strip& strip, int64_t n, uint64_t first, uint64_t step, const RandomKey& key);
  void (*encode)(const Fp4Elements& a, Fp4Strip& strip, int64_t n, bool stochastic);
  // factor[i] = (scale[i] * amax[i]) / 2688, by multiplication
  void (*factors)(const uint8_t* scale, const float* amax, int64_t n, float* factor);
};

const Fp4Loops* fp4_loops_baseline();
const Fp4Loops* fp4_loops_v3();
const Fp4Loops* fp4_loops_v4();

}  // namespace ixt
