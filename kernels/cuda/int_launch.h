// Launchers of the integer kernels; ints.cu holds the ops, the other files the kernels.
#pragma once

#include "fp8_launch.h"

namespace ixt {

// Groups of a row's elements, each with a scale: INT8, or INT4 with two codes a byte.
struct GroupArgs {
  const void* x;
  int64_t rows;
  int64_t cols;
  int64_t stride;  // elements between rows of x
  int group;       // a power of two from 32 to 256
  uint8_t* q;      // contiguous
  float* scale;
  uint8_t* zero;  // asymmetric INT4 only
};

enum class Codes { int8, int4_symmetric, int4_asymmetric };

// As launch_quantize_rows and launch_quantize_current.
void launch_int8_rows(const QuantizeArgs& args, Float in, Target target);
void launch_int8_current(const QuantizeArgs& args, Float in, Target target);

void launch_quantize_groups(const GroupArgs& args, Codes codes, Float in, Target target);

// `cols` elements share a scale.
void launch_dequantize_int8(const uint8_t* q, const float* scale, void* y, int64_t n, int64_t cols,
                            Float out, Target target);

// As GroupArgs, from codes to floats: x is written. INT8 (rows of any length) or INT4, whose codes
// begin at a multiple of 4 bytes.
void launch_dequantize_int8_groups(const uint8_t* q, const float* scale, void* y, int64_t rows,
                                   int64_t cols, int group, Float out, Target target);
void launch_dequantize_int4(const uint8_t* q, const float* scale, const uint8_t* zero, void* y,
                            int64_t n, int group, Float out, Target target);

// Largest magnitudes of rows, or of all rows together.
void launch_amax(const Rows& x, bool whole, float* amax, Float in, Target target);

// Call f(T{}) with the type of the dtype.
template <typename Bf16, typename F16, typename F>
void with_type(Float dtype, const F& f) {
  if (dtype == Float::bf16) {
    f(Bf16{});
  } else if (dtype == Float::f16) {
    f(F16{});
  } else {
    f(float{});
  }
}

}  // namespace ixt
