// INT8, INT4 and amax on the CPU: threads, shapes and registration.
//
// The arithmetic is in ints_loops.cpp and common/ints.h. All results are exact and do not depend on
// the number of threads, since max is associative.
#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>

#include "../common/int_args.h"
#include "ints_loops.h"
#include "isa.h"

namespace ixt {
namespace {

constexpr int64_t kBlock = 4096;       // elements of one call of a loop
constexpr int64_t kGrain = 32 * 1024;  // elements that are worth a thread

const IntLoops& loops_for(Float dtype) {
  static const IntLoopTable* table = IXT_BEST_OF(int_loops);
  return loops_of(*table, dtype);
}

using Two = std::tuple<Output, Output>;
using Three = std::tuple<Output, Output, Output>;

// Run f(row, first, count): runs of at most kBlock elements, whole groups but for a row's end.
template <typename F>
void for_runs(int64_t rows, int64_t cols, int64_t group, const F& f) {
  const int64_t run = std::max(group, kBlock / group * group);
  const int64_t per_row = group_count(cols, run);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, std::min(run, cols)));
  torch::stable::parallel_for(0, rows * per_row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % per_row * run;
      f(i / per_row, first, std::min(run, cols - first));
    }
  });
}

// A matrix of floats: address of an element.
struct Source {
  Source(const Rows& x, Float dtype)
      : data(static_cast<const char*>(x.tensor.const_data_ptr())),
        item(item_size(dtype)),
        stride(x.stride) {}
  const void* at(int64_t row, int64_t col) const { return data + (row * stride + col) * item; }
  const char* data;
  int64_t item;
  int64_t stride;
};

// A contiguous tensor as one row.
Rows as_one_row(const Tensor& t) {
  const Tensor x = as_contiguous(t);
  return {x, 1, x.numel(), x.numel()};
}

float whole_amax(const Rows& x, Float in) {
  const Source source(x, in);
  const auto amax = loops_for(in).amax;
  std::vector<float> partial(group_count(x.cols, kBlock), 0.0f);
  for_runs(1, x.cols, kBlock, [&](int64_t, int64_t first, int64_t count) {
    partial[first / kBlock] = amax(source.at(0, first), count);
  });
  return partial.empty() ? 0.0f : *std::max_element(partial.begin(), partial.end());
}

Output amax(const Tensor& x) {
  const Float in = float_dtype(x, "x");
  Output result = empty(nullptr, 0, dtype_codes().f32, place_of(x));
  *result.data<float>() = whole_amax(as_one_row(x), in);
  return result;
}

Output amax_row(const Tensor& x_any) {
  const Float in = float_dtype(x_any, "x");
  check_rows(x_any, "x");
  const Rows x = as_rows(x_any);
  Output result = empty_per_row(x_any, place_of(x_any));
  const Source source(x, in);
  const auto largest = loops_for(in).amax;
  float* out = result.data<float>();
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.cols));
  torch::stable::parallel_for(0, x.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out[r] = largest(source.at(r, 0), x.cols);
  });
  return result;
}

Two quantize_int8_tensor(const Tensor& x_any) {
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const Rows x = as_one_row(x_any);
  Output q = empty_like(x_any, int_dtypes().i8, place);
  Output scale = empty(nullptr, 0, dtype_codes().f32, place);
  const Source source(x, in);
  const auto quantize = loops_for(in).int8;
  int8_t* dst = q.data<int8_t>();
  const float s = int_scale(whole_amax(x, in), kInt8Max);
  for_runs(1, x.cols, kBlock, [&](int64_t, int64_t first, int64_t count) {
    quantize(source.at(0, first), dst + first, count, s);
  });
  *scale.data<float>() = s;
  return {std::move(q), std::move(scale)};
}

// `group` elements of a row share a scale.
Two quantize_int8(const Tensor& x_any, Float in, int64_t group, int64_t groups) {
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  Output q = empty_like(x_any, int_dtypes().i8, place);
  Output scale = empty(with_columns(x_any, groups), dtype_codes().f32, place);
  const Source source(x, in);
  const auto quantize = loops_for(in).int8_groups;
  int8_t* dst = q.data<int8_t>();
  float* s = scale.data<float>();
  if (x.cols == 0) {  // a row without elements has a scale, though no group
    std::fill_n(s, x.rows * groups, int_scale(0.0f, kInt8Max));
    return {std::move(q), std::move(scale)};
  }
  for_runs(x.rows, x.cols, group, [&](int64_t row, int64_t first, int64_t count) {
    quantize(source.at(row, first), dst + row * x.cols + first, s + row * groups + first / group,
             count, group);
  });
  return {std::move(q), std::move(scale)};
}

Two quantize_int8_row(const Tensor& x) {
  const Float in = float_dtype(x, "x");
  check_rows(x, "x");
  return quantize_int8(x, in, std::max<int64_t>(1, x.size(x.dim() - 1)), 1);
}

Two quantize_int8_group(const Tensor& x, int64_t group) {
  const Float in = float_dtype(x, "x");
  check_rows(x, "x");
  check_group(group);
  return quantize_int8(x, in, group, group_count(x.size(x.dim() - 1), group));
}

Output dequantize_int8(const Tensor& q_any, const Tensor& scale_any, int64_t group,
                       ScalarType dtype) {
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  const int64_t shared = check_dequantize_int8(q_any, scale_any, group, place);
  const Tensor scale = as_contiguous(scale_any);
  const Rows q = shared ? as_rows(q_any) : as_one_row(q_any);
  Output y = empty_like(q_any, code_of(out), place);
  const auto dequantize = loops_for(out).dequantize_int8;
  const auto* src = static_cast<const int8_t*>(q.tensor.const_data_ptr());
  const auto* s = static_cast<const float*>(scale.const_data_ptr());
  char* dst = y.data<char>();
  const int64_t unit = shared ? shared : kBlock;
  const int64_t groups = group_count(q.cols, unit);
  for_runs(q.rows, q.cols, unit, [&](int64_t row, int64_t first, int64_t count) {
    const float* own = shared ? s + row * groups + first / unit : s;
    dequantize(src + row * q.stride + first, own,
               dst + (row * q.cols + first) * item_size(out), count, shared ? unit : count);
  });
  return y;
}

// What both INT4 quantize ops need.
struct Int4 {
  Int4(const Tensor& x_any, int64_t group)
      : in(float_dtype(x_any, "x")), place(place_of(x_any)), x(checked(x_any, group)) {
    groups = x.cols / group;
    q.emplace(empty(with_columns(x_any, x.cols / 2), int_dtypes().u8, place));
    scale.emplace(empty(with_columns(x_any, groups), dtype_codes().f32, place));
  }
  static Rows checked(const Tensor& x, int64_t group) {
    check_rows(x, "x");
    check_group(group);
    check_whole_groups(x.size(x.dim() - 1), group);
    return as_rows(x);
  }
  Float in;
  Place place;
  Rows x;
  int64_t groups = 0;
  std::optional<Output> q;
  std::optional<Output> scale;
};

Two quantize_int4_symmetric(const Tensor& x, int64_t group) {
  Int4 a(x, group);
  const Source source(a.x, a.in);
  const auto quantize = loops_for(a.in).int4_symmetric;
  uint8_t* dst = a.q->data<uint8_t>();
  float* s = a.scale->data<float>();
  for_runs(a.x.rows, a.x.cols, group, [&](int64_t row, int64_t first, int64_t count) {
    quantize(source.at(row, first), dst + (row * a.x.cols + first) / 2,
             s + row * a.groups + first / group, count, group);
  });
  return {std::move(*a.q), std::move(*a.scale)};
}

Three quantize_int4_asymmetric(const Tensor& x, int64_t group) {
  Int4 a(x, group);
  Output zero = empty(with_columns(x, a.groups), int_dtypes().u8, a.place);
  const Source source(a.x, a.in);
  const auto quantize = loops_for(a.in).int4_asymmetric;
  uint8_t* dst = a.q->data<uint8_t>();
  float* s = a.scale->data<float>();
  uint8_t* z = zero.data<uint8_t>();
  for_runs(a.x.rows, a.x.cols, group, [&](int64_t row, int64_t first, int64_t count) {
    const int64_t own = row * a.groups + first / group;
    quantize(source.at(row, first), dst + (row * a.x.cols + first) / 2, s + own, z + own, count,
             group);
  });
  return {std::move(*a.q), std::move(*a.scale), std::move(zero)};
}

Output dequantize_int4(const Tensor& q_any, const Tensor& scale_any,
                       const std::optional<Tensor>& zero_any, int64_t group, ScalarType dtype) {
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  check_dequantize_int4(q_any, scale_any, zero_any, group, place);
  const Rows q = as_rows(q_any);
  const Tensor scale = as_contiguous(scale_any);
  std::optional<Tensor> zero;
  if (zero_any) zero = as_contiguous(*zero_any);
  const int64_t cols = 2 * q.cols;
  Output y = empty(with_columns(q_any, cols), code_of(out), place);
  const auto dequantize = loops_for(out).dequantize_int4;
  const auto* src = static_cast<const uint8_t*>(q.tensor.const_data_ptr());
  const auto* s = static_cast<const float*>(scale.const_data_ptr());
  const auto* z = zero ? static_cast<const uint8_t*>(zero->const_data_ptr()) : nullptr;
  char* dst = y.data<char>();
  for_runs(q.rows, cols, group, [&](int64_t row, int64_t first, int64_t count) {
    const int64_t own = row * (cols / group) + first / group;
    dequantize(src + row * q.stride + first / 2, s + own, z ? z + own : nullptr,
               dst + (row * cols + first) * item_size(out), count, group);
  });
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
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
