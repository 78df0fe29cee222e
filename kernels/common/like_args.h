// Arguments of norms and activations: tensors like another one, vectors of a column each.
#pragma once

#include <optional>

#include "op_args.h"

namespace ixt {

inline void check_place(const Tensor& t, const char* name, const Tensor& like, const char* other) {
  const Place here = place_of(t);
  const Place there = place_of(like);
  IXT_CHECK(here.type == there.type && here.index == there.index, "`", name,
            "` must be on the device of `", other, "`, got another device");
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  const auto left = a.sizes();
  const auto right = b.sizes();
  bool same = left.size() == right.size();
  for (size_t i = 0; same && i < left.size(); ++i) same = left[i] == right[i];
  return same;
}

// `t` must have shape, dtype and device of `like`.
inline void check_like(const Tensor& t, const char* name, const Tensor& like, const char* other) {
  IXT_CHECK(dtype_code(t) == dtype_code(like), "`", name, "` must be ",
            dtype_name(dtype_code(like)), ", got ", dtype_name(dtype_code(t)));
  check_place(t, name, like, other);
  IXT_CHECK(same_shape(t, like), "`", name, "` must have the shape of `", other, "`, ",
            shape_text(like), ", got ", shape_text(t));
}

inline void check_rank(const Tensor& x) {
  IXT_CHECK(x.dim() >= 1, "`x` must have at least one dimension, got 0-d");
}

// A weight or a bias, (K,), contiguous; no data where there is none.
struct Vector {
  std::optional<Tensor> tensor;  // owns the data
  const void* data = nullptr;
  Float dtype = Float::f32;
};

inline Vector vector_arg(const std::optional<Tensor>& t, const char* name, const Tensor& x) {
  if (!t) return {};
  const Float dtype = float_dtype(*t, name);
  check_place(*t, name, x, "x");
  const auto sizes = t->sizes();
  const int64_t cols = x.sizes()[x.dim() - 1];
  IXT_CHECK(sizes.size() == 1 && sizes[0] == cols, "`", name, "` must have the shape (", cols,
            ",), one element a column of `x`, got ", shape_text(*t));
  const Tensor packed = as_contiguous(*t);
  return {packed, packed.const_data_ptr(), dtype};
}

// A mean or rstd: fp32 (*, 1), contiguous.
inline Tensor statistic_arg(const Tensor& t, const char* name, const Tensor& x) {
  IXT_CHECK(dtype_code(t) == dtype_codes().f32, "`", name, "` must be float32, got ",
            dtype_name(dtype_code(t)));
  check_place(t, name, x, "x");
  const auto have = t.sizes();
  const auto like = x.sizes();
  bool same = have.size() == like.size() && have[have.size() - 1] == 1;
  for (size_t i = 0; same && i + 1 < like.size(); ++i) same = have[i] == like[i];
  IXT_CHECK(same, "`", name, "` must have one element a row of `x`, got ", shape_text(t));
  return as_contiguous(t);
}

inline float eps_arg(double eps) { return scale_rule(eps, false, 0.0f).eps; }

// The gradient of a vector: like it, or fp32 (0,).
inline Output empty_gradient(const Vector& vector, int64_t cols, Place place) {
  const int64_t size = vector.tensor ? cols : 0;
  return empty(&size, 1, code_of(vector.dtype), place);
}

}  // namespace ixt
