// Launchers of the NVFP4 kernels; nvfp4.cu holds the ops, the other files the kernels.
#pragma once

#include "../common/nvfp4.h"
#include "../common/philox.h"
#include "../common/scale_layout.h"
#include "fp8_launch.h"

namespace ixt {

// Division by a number that is known at launch: a multiplication, below 2^31. The quotient must be
// below 2^32, as every number of rows is that fits a GPU's memory in blocks of 16.
class Divider {
 public:
  Divider(int64_t divisor, int64_t largest) : divisor_(divisor > 0 ? divisor : 1) {
    narrow_ = largest < (int64_t{1} << 31);
    while ((int64_t{1} << log_) < divisor_ && log_ < 31) ++log_;
    const uint64_t power = uint64_t{1} << (31 + log_);
    factor_ = static_cast<uint32_t>((power + divisor_ - 1) / divisor_);
  }

  __device__ __forceinline__ uint32_t operator()(uint64_t n) const {
    if (!narrow_) return static_cast<uint32_t>(n / divisor_);
    return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(n)} * factor_) >> (31 + log_));
  }

 private:
  uint64_t divisor_;
  uint32_t factor_;
  int log_ = 0;
  bool narrow_;
};

// x as (rows, cols) with unit stride inside a row.
struct Fp4Source {
  const void* x;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  bool wide;  // rows start at multiples of 16 bytes
};

// The result of one orientation: a matrix of `rows` rows and `blocks` blocks of 16 in a row.
struct Fp4Result {
  uint8_t* codes;
  uint8_t* scales;
  const float* amax;
  bool amax_per_row;
  bool gemm;  // scales in the GEMM's order, else plain
  uint32_t rows;
  uint32_t blocks;
  uint32_t scale_rows;  // with the padding
  uint32_t scale_cols;

  // Number of the block at (row, col).
  IXT_HD uint64_t index(uint32_t row, uint32_t col) const {
    return static_cast<uint64_t>(row) * blocks + col;
  }

  // Byte of its scale; in the GEMM's order as common/scale_layout.h has it.
  IXT_HD uint64_t scale_index(uint32_t row, uint32_t col) const {
    if (!gemm) return index(row, col);
    const uint64_t tile = static_cast<uint64_t>(row >> 7) * (scale_cols >> 2) + (col >> 2);
    return tile << 9 | (row & 31) << 4 | (row >> 3 & 12) | (col & 3);
  }
};

struct Fp4Options {
  bool square;
  bool hadamard;
  const int64_t* rng;  // seed and offset on the device, or nullptr
};

// The result's rows are those of x.
void launch_fp4_rows(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, Float in,
                     cudaStream_t stream);

// The result's rows are the columns of x.
void launch_fp4_columns(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, Float in,
                        cudaStream_t stream);

// Both from one read of x; options.hadamard is about the columns.
void launch_fp4_both(const Fp4Source& x, const Fp4Result& rows, const Fp4Result& columns,
                     const Fp4Options& options, Float in, cudaStream_t stream);

// Amax of the transformed x in `amax`, one float.
void launch_fp4_amax(const Fp4Source& x, bool columns, float* amax, Float in, Target target);

// `result` describes the codes, which are contiguous; its amax, codes and scales are only read.
void launch_fp4_dequantize(const Fp4Result& result, bool square, void* y, Float out,
                           cudaStream_t stream);

// Call f(T{}) with the type of the dtype.
template <typename Bf16, typename F16, typename F>
void with_float(Float dtype, const F& f) {
  if (dtype == Float::bf16) {
    f(Bf16{});
  } else if (dtype == Float::f16) {
    f(F16{});
  } else {
    f(float{});
  }
}

}  // namespace ixt
