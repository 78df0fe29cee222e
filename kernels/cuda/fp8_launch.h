// Launchers of the FP8 kernels; fp8.cu holds the ops, the other files the kernels.
#pragma once

#include "common.cuh"

namespace ixt {

// Rows of x whose elements do not all lie together. Whole 16-byte vectors do, and lie aligned.
struct Pieces {
  int64_t length;        // elements that lie together; 0: the rows are whole
  int64_t stride;        // elements from a piece of a row to the next
  int64_t group;         // rows that QuantizeArgs::stride separates,
  int64_t group_stride;  // and elements from a group of them to the next
};

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
  Pieces pieces;       // launch_quantize_current alone takes them
};

struct Target {
  int device;
  cudaStream_t stream;
};

// Whether every row of x and of q can be read and written by vectors of this many elements.
inline bool aligned_rows(const QuantizeArgs& args, int64_t vector) {
  return aligned16(args.x) &&
         (args.rows == 1 || (args.stride % vector == 0 && args.cols % vector == 0));
}

// Whether one launch of a block a row costs less than a fill and more launches, however few rows.
inline bool fits_one_block(const QuantizeArgs& args, Float in) {
  const int64_t size = in == Float::f32 ? 4 : 2;
  // Aligned data of this size stays in the block's registers, other data is read twice.
  return args.cols * size <= (aligned_rows(args, 16 / size) ? 128 : 16) * 1024;
}

// Whether launch_quantize_rows, a block a row, is to do it. Otherwise several blocks share a row:
// for rows that are long and too few to fill the GPU.
inline bool block_a_row(const QuantizeArgs& args, Float in, int device) {
  if (args.rows == 0 || fits_one_block(args, in)) return true;
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
