// FP8 with a transpose beside the codes, and FP8 with a scale a column, on CUDA.
#include "block_ops.h"

namespace ixt {
namespace {

using StaticBoth = std::tuple<Output, Output, Output, Output>;
using TensorBoth = std::tuple<Output, Output, Output>;

StaticBoth quantize_fp8_static_both(const Tensor& x, const Tensor& scale, ScalarType dtype) {
  const BlockInput input(x, dtype);
  IXT_CHECK(scale.numel() == 1, "`scale` must have one element, got the shape ", shape_text(scale));
  scale_grain(scale, "scale", x, input.place);
  const DeviceScope scope(input.place.index);
  const Target target = target_on(input.place);
  Output codes = empty_codes(x, input, false);
  Output codes_t = empty_codes(x, input, true);
  Output scale_inv = empty_like(scale, dtype_codes().f32, input.place);
  Output amax = empty_like(scale, dtype_codes().f32, input.place);
  BlockArgs args = input.args();
  args.codes = codes.data<uint8_t>();
  args.codes_t = codes_t.data<uint8_t>();
  args.scale = static_cast<const float*>(scale.const_data_ptr());
  args.scale_inv = scale_inv.data<float>();
  args.amax = amax.data<float>();
  launch_clear(args.amax, 1, target);
  launch_block_tiles(args, BlockKind::one, input.in, input.out, target);
  return {std::move(codes), std::move(codes_t), std::move(scale_inv), std::move(amax)};
}

TensorBoth quantize_fp8_tensor_both(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const BlockInput input(x_any, dtype);
  const ScaleRule rule = scale_rule(eps, pow2, kFloatMax);
  const DeviceScope scope(input.place.index);
  const Target target = target_on(input.place);
  const Tensor x = as_contiguous(x_any);
  Output codes = empty_codes(x, input, false);
  Output codes_t = empty_codes(x, input, true);
  Output scale_inv = empty(nullptr, 0, dtype_codes().f32, input.place);
  const Output amax = empty(nullptr, 0, dtype_codes().f32, input.place);  // freed in stream order
  BlockArgs args = input.args();
  args.x = x.const_data_ptr();
  args.stride = args.cols;
  args.codes = codes.data<uint8_t>();
  args.codes_t = codes_t.data<uint8_t>();
  args.current = amax.data<float>();
  args.scale_inv = scale_inv.data<float>();
  args.rule.fp8 = rule;
  launch_amax(args.x, x.numel(), amax.data<float>(), input.in, target);
  launch_block_tiles(args, BlockKind::one, input.in, input.out, target);
  return {std::move(codes), std::move(codes_t), std::move(scale_inv)};
}

Quantized quantize_fp8_column(const Tensor& x, ScalarType dtype, bool transposed, double eps,
                              bool pow2) {
  const BlockInput input(x, dtype);
  const ScaleRule rule = scale_rule(eps, pow2, max_finite(input.in));
  const DeviceScope scope(input.place.index);
  const Target target = target_on(input.place);
  const int64_t cols = input.x.cols;
  Output codes = empty_codes(x, input, transposed);
  Output scale_inv = empty_matrix(transposed ? cols : 1, transposed ? 1 : cols, dtype_codes().f32,
                                  input.place);
  const Output amax = empty(&cols, 1, dtype_codes().f32, input.place);
  if (cols == 0) return {std::move(codes), std::move(scale_inv)};
  BlockArgs args = input.args();
  (transposed ? args.codes_t : args.codes) = codes.data<uint8_t>();
  args.rule.fp8 = rule;
  args.group = 128;
  args.columns = amax.data<float>();
  args.side[1] = {scale_inv.data(), ScaleForm::fp32, cols, 1, 1, 1, 0};
  launch_column_amax(args.x, args.rows, cols, args.stride, amax.data<float>(), input.in, target);
  const BlockKind kind = transposed ? BlockKind::columns : BlockKind::crossed;
  launch_block_tiles(args, kind, input.in, input.out, target);
  return {std::move(codes), std::move(scale_inv)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("quantize_fp8_static_both", ixt::Boxed<ixt::quantize_fp8_static_both>::call);
  m.impl("quantize_fp8_tensor_both", ixt::Boxed<ixt::quantize_fp8_tensor_both>::call);
  m.impl("quantize_fp8_column", ixt::Boxed<ixt::quantize_fp8_column>::call);
}
