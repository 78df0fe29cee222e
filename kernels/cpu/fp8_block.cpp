// FP8 with a scale a block on the CPU: quantize_fp8_block and quantize_fp8_block_both.
#include <cstring>
#include <tuple>

#include "block_quantizer.h"
#include "fp8_scaling.h"

namespace ixt {
namespace {

using Scales = StridedScales<float>;

// Scales of a matrix (R, C) of blocks, which is transposed or not, and how to reach them.
std::pair<Output, Scales> make_scales(const Tensor& x, Grid grid, Block block, bool transposed,
                                      bool gemm, Place place) {
  const int32_t f32 = dtype_codes().f32;
  const int64_t rows = transposed ? grid.k : grid.m;
  const int64_t cols = transposed ? grid.m : grid.k;
  int64_t row_step = cols;
  int64_t col_step = 1;
  auto make = [&]() -> Output {
    if (!gemm) return empty_scales(x, grid, block, transposed, f32, place);
    if (block.square()) {
      row_step = round_up(cols, 4);
      return empty_matrix(rows, row_step, f32, place);
    }
    row_step = 1;
    col_step = std::max<int64_t>(rows, 1);
    return empty_strided({rows, cols}, {row_step, col_step}, f32, place);
  };
  Output out = make();
  float* data = out.data<float>();
  if (row_step > cols && cols > 0) memset(data, 0, rows * row_step * sizeof(float));
  const Scales scales{data, transposed ? col_step : row_step, transposed ? row_step : col_step};
  return {std::move(out), scales};
}

using Single = std::tuple<Output, Output>;
using Both = std::tuple<Output, Output, Output, Output>;

Single quantize_fp8_block(const Tensor& x_any, ScalarType dtype, int64_t block_m, int64_t block_k,
                          bool transposed, double eps, bool pow2, const std::string& layout) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Block block{block_m, block_k};
  check_fp8_block(block);
  const Fp8Scaling scaling(out, scale_rule(eps, pow2, max_finite(in)));
  const bool gemm = is_fp8_gemm(layout, block.k == 1 && !transposed);
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  const Grid grid = grid_of(x.rows, x.cols, block);
  Output codes = empty_codes(x_any, transposed, code_of(out), place);
  auto [scale_inv, scales] = make_scales(x_any, grid, block, transposed, gemm, place);
  auto* q = codes.data<uint8_t>();
  const CodesTo to{transposed ? nullptr : q, transposed ? q : nullptr, x.rows, x.cols};
  BlockQuantizer(Matrix(x, in), out, block, scaling, scales, to).run();
  return {std::move(codes), std::move(scale_inv)};
}

Both quantize_fp8_block_both(const Tensor& x_any, ScalarType dtype, int64_t group, bool square,
                             double eps, bool pow2, const std::string& layout) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Block along_k{square ? group : 1, group};
  const Block along_m{group, square ? group : 1};
  IXT_CHECK(group == 32 || group == 64 || group == 128, "`block` must be 32, 64 or 128, got ",
            group);
  const Fp8Scaling scaling(out, scale_rule(eps, pow2, max_finite(in)));
  const bool gemm = is_gemm(layout);
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  const Matrix matrix(x, in);
  Output codes = empty_codes(x_any, false, code_of(out), place);
  Output codes_t = empty_codes(x_any, true, code_of(out), place);
  const Grid grid = grid_of(x.rows, x.cols, along_k);
  const Grid grid_t = grid_of(x.rows, x.cols, along_m);
  auto [scale_inv, scales] = make_scales(x_any, grid, along_k, false, gemm, place);
  auto [scale_inv_t, scales_t] = make_scales(x_any, grid_t, along_m, true, gemm, place);
  auto* q = codes.data<uint8_t>();
  auto* q_t = codes_t.data<uint8_t>();
  if (square) {
    const CodesTo to{q, q_t, x.rows, x.cols};
    BlockQuantizer(matrix, out, along_k, scaling, TwiceScales{scales, scales_t}, to).run();
  } else {
    const CodesTo to{q, nullptr, x.rows, x.cols};
    const CodesTo to_t{nullptr, q_t, x.rows, x.cols};
    const BlockQuantizer rows(matrix, out, along_k, scaling, scales, to);
    const BlockQuantizer columns(matrix, out, along_m, scaling, scales_t, to_t);
    for_tall_tiles(x.rows, x.cols, [&](const Area& area) {
      rows(area);
      columns(area);
    });
  }
  return {std::move(codes), std::move(scale_inv), std::move(codes_t), std::move(scale_inv_t)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("quantize_fp8_block", ixt::Boxed<ixt::quantize_fp8_block>::call);
  m.impl("quantize_fp8_block_both", ixt::Boxed<ixt::quantize_fp8_block_both>::call);
}
