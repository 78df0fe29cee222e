// Inner loops of the CPU kernels. fp8_loops.cpp is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace ixt {

// One entry per input or output dtype; `format` is 0 for e4m3fn and 1 for e5m2.
struct Fp8Loops {
  float (*amax)(const void* x, int64_t n);
  void (*quantize[2])(const void* x, uint8_t* q, int64_t n, float scale);
  void (*dequantize[2])(const uint8_t* q, void* y, int64_t n, float scale_inv);
};

struct Fp8LoopTable {
  const char* isa;
  Fp8Loops f32;
  Fp8Loops f16;
  Fp8Loops bf16;
};

const Fp8LoopTable* fp8_loops_baseline();
const Fp8LoopTable* fp8_loops_v3();  // x86-64-v3: AVX2
const Fp8LoopTable* fp8_loops_v4();  // x86-64-v4: AVX-512

}  // namespace ixt
