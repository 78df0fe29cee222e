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
  float* amax;         // one a row, where wanted or where there are two passes
  ScaleRule rule;
};

struct Target {
  int device;
  cudaStream_t stream;
};

// Whether every row of x and of q can be read and written by vectors of this many elements.
inline bool aligned_rows(const QuantizeArgs& args, int vector) {
  return aligned16(args.x) &&
         (args.rows == 1 || (args.stride % vector == 0 && args.cols % vector == 0));
}

// Whether launch_quantize_rows, a block a row, is to do it. Otherwise several blocks share a row:
// for rows that are too few to fill the GPU and long enough for a fill and more launches.
inline bool block_a_row(const QuantizeArgs& args, Float in, int device) {
  const int64_t size = in == Float::f32 ? 4 : 2;
  // Aligned data of this size stays in the block's registers, other data is read twice.
  const int64_t bytes = (aligned_rows(args, static_cast<int>(16 / size)) ? 128 : 16) * 1024;
  if (args.cols * size <= bytes) return true;
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return args.rows >= 2 * processors;  // to be measured
}

// One scale a row, in one pass over x.
void launch_quantize_rows(const QuantizeArgs& args, Float in, Fp8 out, Target target);

// The same for a few long rows, with several blocks each; scales are given by args.scale.
void launch_quantize_static(const QuantizeArgs& args, Float in, Fp8 out, Target target);

// The same with the scales that follow from the rows' amax, which is left in args.amax: two passes.
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
