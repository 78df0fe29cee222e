// FP8 quantize and dequantize on CUDA: argument checks, allocation, choice of kernel, registration.
//
// Nothing here waits for the GPU or reads a value of it, so every op can be captured in a graph.
// Results do not depend on the order of blocks, since max is associative.
#include <tuple>

#include "fp8_launch.h"

namespace ixt {
namespace {

using Static = std::tuple<Output, Output, Output>;
using Current = std::tuple<Output, Output>;

const float* const_floats(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }

Target target_on(Place place) { return {place.index, current_stream(place.index)}; }

QuantizeArgs whole_args(const Tensor& x, const Output& q, const Output& scale_inv) {
  QuantizeArgs args{};
  args.x = x.const_data_ptr();
  args.rows = 1;
  args.cols = args.stride = x.numel();
  args.q = q.data<uint8_t>();
  args.scale_inv = scale_inv.data<float>();
  return args;
}

QuantizeArgs row_args(const Rows& x, const Output& q, const Output& scale_inv) {
  QuantizeArgs args{};
  args.x = x.tensor.const_data_ptr();
  args.rows = x.rows;
  args.cols = x.cols;
  args.stride = x.stride;
  args.q = q.data<uint8_t>();
  args.scale_inv = scale_inv.data<float>();
  return args;
}

void launch_static(const QuantizeArgs& args, Float in, Fp8 out, Place place) {
  if (block_a_row(args, in, place.index)) {
    launch_quantize_rows(args, in, out, target_on(place));
  } else {
    launch_quantize_static(args, in, out, target_on(place));
  }
}

void launch_two_passes(QuantizeArgs args, Float in, Fp8 out, Place place) {
  // Freed on return, which the allocator orders after the kernels of this stream.
  const Output amax = empty(&args.rows, 1, dtype_codes().f32, place);
  args.amax = amax.data<float>();
  launch_quantize_current(args, in, out, target_on(place));
}

void launch_current(const QuantizeArgs& args, Float in, Fp8 out, Place place) {
  if (block_a_row(args, in, place.index)) {
    launch_quantize_rows(args, in, out, target_on(place));
  } else {
    launch_two_passes(args, in, out, place);
  }
}

// The rows of (rows / group, group, pieces, length), where whole vectors lie together.
bool read_in_pieces(const Tensor& x, Float in, Pieces* pieces) {
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t vector = in == Float::f32 ? 4 : 8;
  *pieces = {sizes[3], strides[2], sizes[1], strides[0]};
  const bool together = strides[3] == 1 && sizes[3] % vector == 0 && strides[2] % vector == 0 &&
                        strides[1] % vector == 0 && strides[0] % vector == 0;
  return together && aligned16(x.const_data_ptr()) && sizes[0] * sizes[1] <= 0xFFFF &&
         sizes[2] * sizes[3] / vector <= 0xFFFFFFFFll;
}

Static static_whole(const Tensor& x_any, const Tensor& scale, Float in, Fp8 out, Place place) {
  const Tensor x = as_contiguous(x_any);
  Output q = empty_like(x, code_of(out), place);
  Output scale_inv = empty_like(scale, dtype_codes().f32, place);
  Output amax = empty_like(scale, dtype_codes().f32, place);
  QuantizeArgs args = whole_args(x, q, scale_inv);
  args.scale = const_floats(scale);
  args.amax = amax.data<float>();
  launch_static(args, in, out, place);
  return {std::move(q), std::move(scale_inv), std::move(amax)};
}

Static static_rows(const Tensor& x_any, const Tensor& scale_any, Float in, Fp8 out, Place place) {
  const Rows x = as_rows(x_any);
  const Tensor scale = as_contiguous(scale_any);
  Output q = empty_like(x_any, code_of(out), place);
  Output scale_inv = empty_per_row(x_any, place);
  Output amax = empty_per_row(x_any, place);
  QuantizeArgs args = row_args(x, q, scale_inv);
  args.scale = const_floats(scale);
  args.amax = amax.data<float>();
  launch_static(args, in, out, place);
  return {std::move(q), std::move(scale_inv), std::move(amax)};
}

Static quantize_fp8_static(const Tensor& x, const Tensor& scale, ScalarType dtype) {
  const Float in = float_dtype(x, "x");
  const Fp8 out = fp8_dtype(dtype);
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  return scale_grain(scale, "scale", x, place) == Grain::tensor
             ? static_whole(x, scale, in, out, place)
             : static_rows(x, scale, in, out, place);
}

Current quantize_fp8_tensor(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  const ScaleRule rule = scale_rule(eps, pow2, kFloatMax);
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Tensor x = as_contiguous(x_any);
  Output q = empty_like(x, code_of(out), place);
  Output scale_inv = empty(nullptr, 0, dtype_codes().f32, place);
  QuantizeArgs args = whole_args(x, q, scale_inv);
  args.rule = rule;
  launch_current(args, in, out, place);
  return {std::move(q), std::move(scale_inv)};
}

Current quantize_fp8_row(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  IXT_CHECK(x_any.dim() >= 1, "`x` must have at least 1 dimension, got 0");
  const ScaleRule rule = scale_rule(eps, pow2, max_finite(in));
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Output q = empty_like(x_any, code_of(out), place);
  Output scale_inv = empty_per_row(x_any, place);
  QuantizeArgs args = row_args(x, q, scale_inv);
  args.rule = rule;
  launch_current(args, in, out, place);
  return {std::move(q), std::move(scale_inv)};
}

// (B, H, S, D) with a scale for each of B and H, read where it lies.
Current quantize_fp8_heads(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  IXT_CHECK(x_any.dim() == 4, "`x` must have 4 dimensions, (B, H, S, D), got ", x_any.dim());
  const ScaleRule rule = scale_rule(eps, pow2, max_finite(in));
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const auto sizes = x_any.sizes();
  const int64_t cols = sizes[2] * sizes[3];
  Output q = empty_like(x_any, code_of(out), place);
  Output scale_inv = empty(sizes.data(), 2, dtype_codes().f32, place);
  QuantizeArgs args = row_args({x_any, sizes[0] * sizes[1], cols, cols}, q, scale_inv);
  args.rule = rule;
  Pieces pieces;
  if (x_any.is_contiguous()) {
    launch_current(args, in, out, place);
  } else if (!fits_one_block(args, in) && read_in_pieces(x_any, in, &pieces)) {
    args.stride = x_any.strides()[1];
    args.pieces = pieces;
    launch_two_passes(args, in, out, place);
  } else {
    const Tensor x = as_contiguous(x_any);
    args.x = x.const_data_ptr();
    launch_current(args, in, out, place);
  }
  return {std::move(q), std::move(scale_inv)};
}

Output dequantize_fp8(const Tensor& q_any, const Tensor& scale_any, ScalarType dtype) {
  const Fp8 in = fp8_dtype(q_any, "codes");
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  const DeviceScope scope(place.index);
  const Grain grain = scale_grain(scale_any, "scale_inv", q_any, place);
  const Tensor q = as_contiguous(q_any);
  const Tensor scale = as_contiguous(scale_any);
  Output y = empty_like(q, code_of(out), place);
  const int64_t n = q.numel();
  const int64_t cols = grain == Grain::tensor ? n : q.size(q.dim() - 1);
  launch_dequantize(static_cast<const uint8_t*>(q.const_data_ptr()), const_floats(scale),
                    y.data(), n, cols, in, out, target_on(place));
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("quantize_fp8_static", ixt::Boxed<ixt::quantize_fp8_static>::call);
  m.impl("quantize_fp8_tensor", ixt::Boxed<ixt::quantize_fp8_tensor>::call);
  m.impl("quantize_fp8_row", ixt::Boxed<ixt::quantize_fp8_row>::call);
  m.impl("quantize_fp8_heads", ixt::Boxed<ixt::quantize_fp8_heads>::call);
  m.impl("dequantize_fp8", ixt::Boxed<ixt::dequantize_fp8>::call);
}
