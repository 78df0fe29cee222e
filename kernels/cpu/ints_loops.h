// Inner loops of the integer formats on the CPU. ints_loops.cpp is compiled once per instruction
// set.
#pragma once

#include <cstdint>

namespace ixt {

// For one dtype of the floating-point side. `group` elements share a scale, the last group may be
// shorter; `scale` and `zero` point to those of the first group. For INT4, n is a multiple of
// group, and two elements share a byte.
struct IntLoops {
  float (*amax)(const void* x, int64_t n);
  void (*int8)(const void* x, int8_t* q, int64_t n, float scale);  // with a given scale
  void (*int8_groups)(const void* x, int8_t* q, float* scale, int64_t n, int64_t group);
  void (*int4_symmetric)(const void* x, uint8_t* q, float* scale, int64_t n, int64_t group);
  void (*int4_asymmetric)(const void* x, uint8_t* q, float* scale, uint8_t* zero, int64_t n,
                          int64_t group);
  void (*dequantize_int8)(const int8_t* q, const float* scale, void* y, int64_t n, int64_t group);
  // `zero` is null for symmetric codes.
  void (*dequantize_int4)(const uint8_t* q, const float* scale, const uint8_t* zero, void* y,
                          int64_t n, int64_t group);
};

struct IntLoopTable {
  IntLoops f32;
  IntLoops f16;
  IntLoops bf16;
};

const IntLoopTable* int_loops_baseline();
const IntLoopTable* int_loops_v3();  // x86-64-v3: AVX2
const IntLoopTable* int_loops_v4();  // x86-64-v4: AVX-512

}  // namespace ixt
