// Delayed scaling on the CPU: next history and scale, as results or in place.
#include <algorithm>
#include <string>
#include <tuple>

#include "../common/int_args.h"

namespace ixt {
namespace {

// A matrix (entries, tensors) of floats with any strides; a vector has one column.
template <typename Float>
struct Strided {
  Float* data;
  int64_t row;
  int64_t column;
  Float& at(int64_t i, int64_t n) const { return data[i * row + n * column]; }
};

// Every entry is read before its place is written: in and out may be the same.
void update(const ScaleUpdate& u, Strided<const float> history, Strided<const float> scale,
            Strided<float> new_history, Strided<float> new_scale) {
  for (int64_t n = 0; n < u.columns; ++n) {
    const float last = u.length ? history.at(0, n) : 0.0f;
    float amax = u.most_recent ? last : 0.0f;
    for (int64_t i = 0; i < u.length; ++i) {
      const float entry = history.at(i, n);
      if (!u.most_recent) amax = entry > amax ? entry : amax;  // false for NaN
      if (i > 0) new_history.at(i - 1, n) = entry;
    }
    if (u.length) {
      new_history.at(u.length - 1, n) = last;
      new_history.at(0, n) = 0.0f;
    }
    new_scale.at(0, n) = updated_scale(amax, u.largest, scale.at(0, n));
  }
}

Strided<const float> reading(const Tensor& t) {
  const auto strides = t.strides();
  return {static_cast<const float*>(t.const_data_ptr()), t.dim() ? strides[0] : 0,
          t.dim() == 2 ? strides[1] : 0};
}

// A scale is one row.
template <typename Float>
Strided<Float> as_row(Float* data, const Tensor& scale) {
  return {data, 0, scale.dim() == 1 ? scale.strides()[0] : 0};
}

std::tuple<Output, Output> update_fp8_scale(const Tensor& history, const Tensor& scale,
                                            ScalarType dtype, int64_t margin,
                                            const std::string& algorithm) {
  const ScaleUpdate u = check_scale_update(history, scale, dtype, margin, algorithm);
  const Place place = place_of(history);
  Output new_history = empty_like(history, dtype_codes().f32, place);
  Output new_scale = empty_like(scale, dtype_codes().f32, place);
  update(u, reading(history), as_row(static_cast<const float*>(scale.const_data_ptr()), scale),
         {new_history.data<float>(), u.columns, 1}, {new_scale.data<float>(), 0, 1});
  return {std::move(new_history), std::move(new_scale)};
}

std::tuple<> update_fp8_scale_(const Tensor& history, const Tensor& scale, ScalarType dtype,
                               int64_t margin, const std::string& algorithm) {
  const ScaleUpdate u = check_scale_update(history, scale, dtype, margin, algorithm);
  check_not_expanded(history, "history");
  check_not_expanded(scale, "scale");
  const Strided<const float> from = reading(history);
  auto* h = static_cast<float*>(history.mutable_data_ptr());
  auto* s = static_cast<float*>(scale.mutable_data_ptr());
  update(u, from, as_row(static_cast<const float*>(s), scale), {h, from.row, from.column},
         as_row(s, scale));
  return {};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("update_fp8_scale", ixt::Boxed<ixt::update_fp8_scale>::call);
  m.impl("update_fp8_scale_", ixt::Boxed<ixt::update_fp8_scale_>::call);
}
