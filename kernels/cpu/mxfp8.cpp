// MXFP8 on the CPU: quantize_mxfp8 and quantize_mxfp8_both.
#include <cstring>
#include <tuple>

#include "block_quantizer.h"
#include "mx_scales.h"

namespace ixt {
namespace {

constexpr int64_t kGroup = 32;

class MxScaling {
 public:
  using Stored = uint8_t;  // e8m0

  MxScaling(Fp8 out, const std::string& mode)
      : scales_(block_loop_table().mx_scales[static_cast<int>(out)]), ceil_(mode == "ceil") {
    IXT_CHECK(mode == "ceil" || mode == "floor", "`mode` must be \"ceil\" or \"floor\", got \"",
              mode, "\"");
  }

  void operator()(const float* amax, int64_t n, float* scale, uint8_t* stored) const {
    scales_(amax, n, ceil_, scale, stored);
  }

 private:
  void (*scales_)(const float*, int64_t, bool, float*, uint8_t*);
  bool ceil_;
};

std::pair<Output, MxScales> make_scales(const Tensor& t, const Rows& x, Block block,
                                        bool transposed, bool gemm, Place place) {
  const int32_t u8 = aoti_torch_dtype_uint8();
  if (gemm) {
    const MxOperand operand = mx_operand(x.rows, x.cols, block, transposed);
    Output out = empty_matrix(operand.padded_rows(), operand.padded_cols(), u8, place);
    auto* data = out.data<uint8_t>();
    if (operand.padded()) memset(data, 0, operand.padded_rows() * operand.padded_cols());
    return {std::move(out), MxScales::swizzled(data, operand)};
  }
  const Grid grid = grid_of(x.rows, x.cols, block);
  Output out = empty_scales(t, grid, block, transposed, u8, place);
  auto* data = out.data<uint8_t>();
  return {std::move(out), MxScales::plain(data, grid, transposed)};
}

using Single = std::tuple<Output, Output>;
using Both = std::tuple<Output, Output, Output, Output>;

Single quantize_mxfp8(const Tensor& x_any, ScalarType dtype, int64_t block_m, int64_t block_k,
                      bool transposed, const std::string& mode, const std::string& layout) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Block block{block_m, block_k};
  check_mx_block(block);
  const MxScaling scaling(out, mode);
  const bool gemm = is_gemm(layout);
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  Output codes = empty_codes(x_any, transposed, code_of(out), place);
  auto [stored, scales] = make_scales(x_any, x, block, transposed, gemm, place);
  auto* q = codes.data<uint8_t>();
  const CodesTo to{transposed ? nullptr : q, transposed ? q : nullptr, x.rows, x.cols};
  BlockQuantizer(Matrix(x, in), out, block, scaling, scales, to).run();
  return {std::move(codes), std::move(stored)};
}

Both quantize_mxfp8_both(const Tensor& x_any, ScalarType dtype, bool square, bool transposed,
                         const std::string& mode, const std::string& layout) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Block along_k{square ? kGroup : 1, kGroup};
  const Block along_m{kGroup, square ? kGroup : 1};
  const MxScaling scaling(out, mode);
  const bool gemm = is_gemm(layout);
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  const Matrix matrix(x, in);
  Output codes = empty_codes(x_any, false, code_of(out), place);
  Output codes_m = empty_codes(x_any, transposed, code_of(out), place);
  auto [stored, scales] = make_scales(x_any, x, along_k, false, gemm, place);
  auto [stored_m, scales_m] = make_scales(x_any, x, along_m, transposed, gemm, place);
  auto* q = codes.data<uint8_t>();
  auto* q_m = codes_m.data<uint8_t>();
  if (square && transposed) {
    const CodesTo to{q, q_m, x.rows, x.cols};
    BlockQuantizer(matrix, out, along_k, scaling, TwiceScales{scales, scales_m}, to).run();
  } else {
    const CodesTo to{q, nullptr, x.rows, x.cols};
    const CodesTo to_m{transposed ? nullptr : q_m, transposed ? q_m : nullptr, x.rows, x.cols};
    const BlockQuantizer first(matrix, out, along_k, scaling, scales, to);
    const BlockQuantizer second(matrix, out, along_m, scaling, scales_m, to_m);
    for_tall_tiles(x.rows, x.cols, [&](const Area& area) {
      first(area);
      second(area);
    });
  }
  return {std::move(codes), std::move(stored), std::move(codes_m), std::move(stored_m)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("quantize_mxfp8", ixt::Boxed<ixt::quantize_mxfp8>::call);
  m.impl("quantize_mxfp8_both", ixt::Boxed<ixt::quantize_mxfp8_both>::call);
}
