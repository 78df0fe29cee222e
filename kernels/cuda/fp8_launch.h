// Launchers of the FP8 kernels; fp8.cu holds the ops, the other files the kernels.
#pragma once

#include "common.cuh"

namespace ixt {

// What one quantize call reads and writes, as rows of one stride. A whole tensor is one row.
struct QuantizeArgs {
  const void* x;
  int64_t rows;
  int64_t cols;
  int64_t stride;      // elements between rows of x
  uint8_t* q;          // contiguous
  const float* scale;  // given scale (static), one a row, or nullptr: scale comes from amax
  float* scale_inv;    // one a row
  float* amax;         // one a row, where wanted
  ScaleRule rule;
};

struct Target {
  int device;
  cudaStream_t stream;
};

// Whether launch_quantize_rows is to do a whole tensor, as one row: one launch of one block costs
// less than a fill and more launches.
inline bool fits_one_block(const QuantizeArgs& args, Float in) {
  const int64_t bytes = args.cols * (in == Float::f32 ? 4 : 2);
  // Aligned data of this size stays in the block's registers, other data is read twice.
  return bytes <= (aligned16(args.x) ? 128 : 16) * 1024;
}

// One scale a row, in one pass over x.
void launch_quantize_rows(const QuantizeArgs& args, Float in, Fp8 out, Target target);

// One scale for a contiguous tensor of args.cols elements, given by args.scale.
void launch_quantize_static(const QuantizeArgs& args, Float in, Fp8 out, Target target);

// One scale for a contiguous tensor, from its amax, which is left in args.amax.
void launch_quantize_current(const QuantizeArgs& args, Float in, Fp8 out, Target target);

// Zeros. The next kernel of the stream may start before this one ends.
void launch_clear(void* words, int64_t count, Target target);

// The amax of a contiguous tensor. The next kernel of the stream may start before this one ends.
void launch_amax(const void* x, int64_t n, float* amax, Float in, Target target);

// `cols` is the number of elements that share a scale.
void launch_dequantize(const uint8_t* q, const float* scale_inv, void* y, int64_t n, int64_t cols,
                       Fp8 in, Float out, Target target);

// Call f(T{}, Format{}) with the types of the two dtypes.
template <typename Bf16, typename F16, typename F>
void with_types(Float value, Fp8 code, const F& f) {
  auto inner = [&](auto t) { code == Fp8::e4m3 ? f(t, E4M3{}) : f(t, E5M2{}); };
  if (value == Float::bf16) {
    inner(Bf16{});
  } else if (value == Float::f16) {
    inner(F16{});
  } else {
    inner(float{});
  }
}

}  // namespace ixt
