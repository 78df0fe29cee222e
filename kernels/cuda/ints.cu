// INT8, INT4 and amax on CUDA: argument checks, allocation, choice of kernel, registration.
//
// Nothing here waits for the GPU or reads a value of it, so every op can be captured in a graph.
// Results do not depend on the order of blocks, since max is associative.
#include <optional>
#include <tuple>

#include "../common/int_args.h"
#include "int_launch.h"

namespace ixt {
namespace {

using Two = std::tuple<Output, Output>;
using Three = std::tuple<Output, Output, Output>;

Target target_on(Place place) { return {place.index, current_stream(place.index)}; }

Output amax(const Tensor& x_any) {
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  Output result = empty(nullptr, 0, dtype_codes().f32, place);
  // Rows that lie apart are read where they are; contiguous ones are one long row.
  const Rows x = x_any.dim() && !x_any.is_contiguous()
                     ? as_rows(x_any)
                     : Rows{x_any, 1, x_any.numel(), x_any.numel()};
  launch_amax(x, true, result.data<float>(), in, target_on(place));
  return result;
}

Output amax_row(const Tensor& x) {
  const Float in = float_dtype(x, "x");
  check_rows(x, "x");
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  Output result = empty_per_row(x, place);
  launch_amax(as_rows(x), false, result.data<float>(), in, target_on(place));
  return result;
}

QuantizeArgs quantize_args(const Rows& x, const Output& q, const Output& scale) {
  QuantizeArgs args{};
  args.x = x.tensor.const_data_ptr();
  args.rows = x.rows;
  args.cols = x.cols;
  args.stride = x.stride;
  args.q = q.data<uint8_t>();
  args.scale_inv = scale.data<float>();
  return args;
}

void launch_int8(QuantizeArgs args, Float in, Place place) {
  if (block_a_row(args, in, place.index)) {
    launch_int8_rows(args, in, target_on(place));
    return;
  }
  // Freed on return, which the allocator orders after the kernels of this stream.
  const Output amax = empty(&args.rows, 1, dtype_codes().f32, place);
  args.amax = amax.data<float>();
  launch_int8_current(args, in, target_on(place));
}

Two quantize_int8_tensor(const Tensor& x_any) {
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Tensor x = as_contiguous(x_any);
  Output q = empty_like(x, int_dtypes().i8, place);
  Output scale = empty(nullptr, 0, dtype_codes().f32, place);
  launch_int8(quantize_args({x, 1, x.numel(), x.numel()}, q, scale), in, place);
  return {std::move(q), std::move(scale)};
}

Two quantize_int8_row(const Tensor& x_any) {
  const Float in = float_dtype(x_any, "x");
  check_rows(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Output q = empty_like(x_any, int_dtypes().i8, place);
  Output scale = empty_per_row(x_any, place);
  launch_int8(quantize_args(x, q, scale), in, place);
  return {std::move(q), std::move(scale)};
}

// Codes of rows in groups; `bytes` of them a row.
struct Grouped {
  Grouped(const Tensor& x_any, const Rows& x, int64_t group, int64_t bytes, int32_t dtype,
          Place place)
      : shape(with_columns(x_any, group_count(x.cols, group))),
        q(empty(with_columns(x_any, bytes), dtype, place)),
        scale(empty(shape, dtype_codes().f32, place)),
        args{x.tensor.const_data_ptr(), x.rows, x.cols, x.stride, static_cast<int>(group),
             q.data<uint8_t>(), scale.data<float>(), nullptr} {}
  std::vector<int64_t> shape;
  Output q;
  Output scale;
  GroupArgs args;
};

Two quantize_int8_group(const Tensor& x_any, int64_t group) {
  const Float in = float_dtype(x_any, "x");
  check_rows(x_any, "x");
  check_group(group);
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Grouped made(x_any, x, group, x.cols, int_dtypes().i8, place);
  launch_quantize_groups(made.args, Codes::int8, in, target_on(place));
  return {std::move(made.q), std::move(made.scale)};
}

Float check_int4(const Tensor& x, int64_t group) {
  const Float in = float_dtype(x, "x");
  check_rows(x, "x");
  check_group(group);
  check_whole_groups(x.size(x.dim() - 1), group);
  return in;
}

Two quantize_int4_symmetric(const Tensor& x_any, int64_t group) {
  const Float in = check_int4(x_any, group);
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Grouped made(x_any, x, group, x.cols / 2, int_dtypes().u8, place);
  launch_quantize_groups(made.args, Codes::int4_symmetric, in, target_on(place));
  return {std::move(made.q), std::move(made.scale)};
}

Three quantize_int4_asymmetric(const Tensor& x_any, int64_t group) {
  const Float in = check_int4(x_any, group);
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Grouped made(x_any, x, group, x.cols / 2, int_dtypes().u8, place);
  Output zero = empty(made.shape, int_dtypes().u8, place);
  made.args.zero = zero.data<uint8_t>();
  launch_quantize_groups(made.args, Codes::int4_asymmetric, in, target_on(place));
  return {std::move(made.q), std::move(made.scale), std::move(zero)};
}

Output dequantize_int8(const Tensor& q_any, const Tensor& scale_any, int64_t group,
                       ScalarType dtype) {
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  const DeviceScope scope(place.index);
  const int64_t shared = check_dequantize_int8(q_any, scale_any, group, place);
  const Tensor q = as_contiguous(q_any);
  const Tensor scale = as_contiguous(scale_any);
  Output y = empty_like(q, code_of(out), place);
  const auto* codes = static_cast<const uint8_t*>(q.const_data_ptr());
  const auto* s = static_cast<const float*>(scale.const_data_ptr());
  const int64_t n = q.numel();
  if (group == 0) {
    launch_dequantize_int8(codes, s, y.data(), n, shared ? shared : n, out, target_on(place));
  } else {
    const int64_t cols = q.size(q.dim() - 1);
    launch_dequantize_int8_groups(codes, s, y.data(), cols ? n / cols : 0, cols,
                                  static_cast<int>(group), out, target_on(place));
  }
  return y;
}

Output dequantize_int4(const Tensor& q_any, const Tensor& scale_any,
                       const std::optional<Tensor>& zero_any, int64_t group, ScalarType dtype) {
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  const DeviceScope scope(place.index);
  check_dequantize_int4(q_any, scale_any, zero_any, group, place);
  Tensor q = as_contiguous(q_any);
  if (reinterpret_cast<uintptr_t>(q.const_data_ptr()) % 4 != 0) q = torch::stable::clone(q);
  const Tensor scale = as_contiguous(scale_any);
  std::optional<Tensor> zero;
  if (zero_any) zero = as_contiguous(*zero_any);
  const int64_t n = 2 * q.numel();
  Output y = empty(with_columns(q, 2 * q.size(q.dim() - 1)), code_of(out), place);
  launch_dequantize_int4(static_cast<const uint8_t*>(q.const_data_ptr()),
                         static_cast<const float*>(scale.const_data_ptr()),
                         zero ? static_cast<const uint8_t*>(zero->const_data_ptr()) : nullptr,
                         y.data(), n, static_cast<int>(group), out, target_on(place));
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("amax", ixt::Boxed<ixt::amax>::call);
  m.impl("amax_row", ixt::Boxed<ixt::amax_row>::call);
  m.impl("quantize_int8_tensor", ixt::Boxed<ixt::quantize_int8_tensor>::call);
  m.impl("quantize_int8_row", ixt::Boxed<ixt::quantize_int8_row>::call);
  m.impl("quantize_int8_group", ixt::Boxed<ixt::quantize_int8_group>::call);
  m.impl("dequantize_int8", ixt::Boxed<ixt::dequantize_int8>::call);
  m.impl("quantize_int4_symmetric", ixt::Boxed<ixt::quantize_int4_symmetric>::call);
  m.impl("quantize_int4_asymmetric", ixt::Boxed<ixt::quantize_int4_asymmetric>::call);
  m.impl("dequantize_int4", ixt::Boxed<ixt::dequantize_int4>::call);
}
