// Dequantizing with a scale a block on the CPU: dequantize_fp8_block and dequantize_mxfp8.
#include "../common/mxfp8.h"
#include "mx_scales.h"
#include "tiles.h"

namespace ixt {
namespace {

// y = cast(q * scale(i, j)) for blocks (i, j).
template <typename Scale>
class BlockDequantizer {
 public:
  BlockDequantizer(const Rows& q, Fp8 in, Float out, Block block, Scale scale, char* y)
      : codes_(static_cast<const uint8_t*>(q.tensor.const_data_ptr())),
        q_(q),
        loops_(loops_of(block_loop_table(), out)),
        format_(static_cast<int>(in)),
        item_(item_size(out)),
        block_(block),
        scale_(scale),
        y_(y) {}

  void run() const {
    if (block_.k > 1) {
      for_flat_tiles(q_.rows, q_.cols, [&](const Area& area) { rows(area); });
    } else {
      for_tall_tiles(q_.rows, q_.cols, [&](const Area& area) { columns(area); });
    }
  }

 private:
  // Blocks of 1 x G and G x G.
  void rows(const Area& a) const {
    float scale[kTileGroups];
    const int64_t groups = ceil_div(a.cols, block_.k);
    const int64_t first = a.k / block_.k;
    for (int64_t r = 0; r < a.rows; ++r) {
      const int64_t i = (a.m + r) / block_.m;
      for (int64_t g = 0; g < groups; ++g) scale[r * groups + g] = scale_(i, first + g);
    }
    loops_.dequantize_groups[format_](tile(a), block_.k, scale, groups, to(a), q_.cols);
  }

  // Blocks of G x 1.
  void columns(const Area& a) const {
    for (int64_t r = 0; r < a.rows; r += block_.m) {
      const Area band{a.m + r, a.k, std::min(block_.m, a.rows - r), a.cols};
      float scale[kTileCols];
      for (int64_t c = 0; c < a.cols; ++c) scale[c] = scale_(band.m / block_.m, a.k + c);
      loops_.dequantize_columns[format_](tile(band), scale, to(band), q_.cols);
    }
  }

  CodesIn tile(const Area& a) const {
    return {codes_ + a.m * q_.stride + a.k, q_.stride, a.rows, a.cols};
  }

  void* to(const Area& a) const { return y_ + (a.m * q_.cols + a.k) * item_; }

  const uint8_t* codes_;
  const Rows& q_;
  const BlockLoops& loops_;
  int format_;
  int64_t item_;
  Block block_;
  Scale scale_;
  char* y_;
};

// Scales (*, C) as a matrix (R, C), and what holds their data.
template <typename T>
struct HeldScales {
  Tensor tensor;
  StridedScales<const T> scales;
};

template <typename T>
HeldScales<T> hold_scales(const Tensor& scales) {
  if (scales.dim() == 2) {  // in place, column-major ones too
    const auto strides = scales.strides();
    return {scales, {static_cast<const T*>(scales.const_data_ptr()), strides[0], strides[1]}};
  }
  const Rows rows = as_rows(scales);
  return {rows.tensor, {static_cast<const T*>(rows.tensor.const_data_ptr()), rows.stride, 1}};
}

Output dequantize_fp8_block(const Tensor& q_any, const Tensor& scale_any, int64_t block_m,
                            int64_t block_k, ScalarType dtype, const std::string& layout) {
  const Fp8 in = fp8_dtype(q_any, "codes");
  const Float out = float_dtype(dtype);
  check_rank(q_any, "codes");
  const Block block{block_m, block_k};
  check_fp8_block(block);
  const bool gemm = is_fp8_gemm(layout, block.k == 1);
  check_scales(scale_any, "scale_inv", dtype_codes().f32, q_any);
  const Rows q = as_rows(q_any);
  const Grid grid = grid_of(q.rows, q.cols, block);
  std::vector<int64_t> shape = scale_shape(q_any, grid, block);
  if (gemm) shape = {grid.m, block.square() ? round_up(grid.k, 4) : grid.k};
  check_shape(scale_any, "scale_inv", shape);
  const auto held = hold_scales<float>(scale_any);
  Output y = empty_like(q_any, code_of(out), place_of(q_any));
  const auto scale = [&](int64_t i, int64_t j) { return held.scales.at(i, j); };
  BlockDequantizer(q, in, out, block, scale, y.data<char>()).run();
  return y;
}

Output dequantize_mxfp8(const Tensor& q_any, const Tensor& scale_any, int64_t block_m,
                        int64_t block_k, ScalarType dtype, const std::string& layout) {
  const Fp8 in = fp8_dtype(q_any, "codes");
  const Float out = float_dtype(dtype);
  check_rank(q_any, "codes");
  const Block block{block_m, block_k};
  check_mx_block(block);
  const bool gemm = is_gemm(layout);
  check_scales(scale_any, "scales", aoti_torch_dtype_uint8(), q_any);
  const Rows q = as_rows(q_any);
  const Grid grid = grid_of(q.rows, q.cols, block);
  const MxOperand operand = mx_operand(q.rows, q.cols, block, false);
  check_shape(scale_any, "scales",
              gemm ? std::vector<int64_t>{operand.padded_rows(), operand.padded_cols()}
                   : scale_shape(q_any, grid, block));
  Output y = empty_like(q_any, code_of(out), place_of(q_any));
  if (gemm) {
    const Tensor tiles = as_contiguous(scale_any);
    const auto* data = static_cast<const uint8_t*>(tiles.const_data_ptr());
    const auto scale = [=](int64_t i, int64_t j) {
      const int64_t row = operand.along_m ? j : i * operand.repeat;
      const int64_t col = operand.along_m ? i : j;
      return e8m0_value(data[swizzled(row, col, operand.padded_cols())]);
    };
    BlockDequantizer(q, in, out, block, scale, y.data<char>()).run();
  } else {
    const auto held = hold_scales<uint8_t>(scale_any);
    const auto scale = [&](int64_t i, int64_t j) { return e8m0_value(held.scales.at(i, j)); };
    BlockDequantizer(q, in, out, block, scale, y.data<char>()).run();
  }
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("dequantize_fp8_block", ixt::Boxed<ixt::dequantize_fp8_block>::call);
  m.impl("dequantize_mxfp8", ixt::Boxed<ixt::dequantize_mxfp8>::call);
}
