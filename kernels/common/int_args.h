// Argument checks and shapes of the integer formats; the words are those of inductor_ext/ops.
#pragma once

#include "ints.h"
#include "op_args.h"

namespace ixt {

struct IntDtypes {
  int32_t i8 = aoti_torch_dtype_int8();
  int32_t u8 = aoti_torch_dtype_uint8();
};

inline const IntDtypes& int_dtypes() {
  static const IntDtypes codes;
  return codes;
}

inline void check_dtype(const Tensor& t, const char* name, int32_t wanted) {
  const int32_t code = dtype_code(t);
  IXT_CHECK(code == wanted, "`", name, "` must be ", dtype_name(wanted), ", got ",
            dtype_name(code));
}

inline void check_rows(const Tensor& t, const char* name) {
  IXT_CHECK(t.dim() >= 1, "`", name, "` must have at least one dimension, got 0-d");
}

inline std::string device_text(Place place) {
  if (place.type == aoti_torch_device_type_cpu()) return "cpu";
  return "cuda:" + std::to_string(place.index);
}

inline void check_device(const Tensor& t, const char* name, const char* other, Place place) {
  const Place its = place_of(t);
  IXT_CHECK(its.type == place.type && its.index == place.index, "`", name,
            "` must be on the device of `", other, "`, ", device_text(place), ", got ",
            device_text(its));
}

inline bool is_group(int64_t group) {
  return group == 32 || group == 64 || group == 128 || group == 256;
}

inline void check_group(int64_t group) {
  IXT_CHECK(is_group(group), "`group` must be 32, 64, 128 or 256, got ", group);
}

inline int64_t group_count(int64_t columns, int64_t group) { return (columns + group - 1) / group; }

inline void check_whole_groups(int64_t columns, int64_t group) {
  if (columns % group == 0) return;
  int64_t smaller = group / 2;
  while (smaller >= 32 && columns % smaller != 0) smaller /= 2;
  const std::string hint = smaller >= 32
                               ? "use group " + std::to_string(smaller)
                               : "pad to " + std::to_string(group_count(columns, group) * group);
  fail("`x` must have rows of a multiple of `group` elements, ", group, ", got ", columns, ": ",
       hint);
}

// t.shape[:-1] with another last size.
inline std::vector<int64_t> with_columns(const Tensor& t, int64_t columns) {
  const auto sizes = t.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = columns;
  return shape;
}

inline bool has_shape(const Tensor& t, const std::vector<int64_t>& shape) {
  const auto sizes = t.sizes();
  return sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
}

inline Output empty(const std::vector<int64_t>& shape, int32_t dtype, Place place) {
  return empty(shape.data(), static_cast<int64_t>(shape.size()), dtype, place);
}

// One element of `dtype` for each group of the codes' rows.
inline void check_group_tensor(const Tensor& t, const char* name, const Tensor& codes,
                               int64_t columns, int64_t group, int32_t dtype, Place place) {
  check_dtype(t, name, dtype);
  check_device(t, name, "codes", place);
  const std::vector<int64_t> shape = with_columns(codes, group_count(columns, group));
  IXT_CHECK(has_shape(t, shape), "`", name, "` must have the shape ", shape_text(shape),
            ", one element a group of ", group, ", got ", shape_text(t));
}

// A scale of one element, or one a row. Returns whether it is one a row.
inline bool check_row_scale(const Tensor& scale, const Tensor& codes, Place place) {
  check_dtype(scale, "scale", dtype_codes().f32);
  check_device(scale, "scale", "codes", place);
  if (scale.numel() == 1) return false;
  const std::vector<int64_t> shape =
      codes.dim() ? with_columns(codes, 1) : std::vector<int64_t>{};
  IXT_CHECK(codes.dim() && has_shape(scale, shape), "`scale` must have one element or the shape ",
            shape_text(shape), ", a scale for each row of `codes`, got ", shape_text(scale));
  return true;
}

// What dequantize_int8 was given: elements that share a scale (0: all of them).
inline int64_t check_dequantize_int8(const Tensor& codes, const Tensor& scale, int64_t group,
                                     Place place) {
  check_dtype(codes, "codes", int_dtypes().i8);
  if (group == 0) {
    return check_row_scale(scale, codes, place) ? codes.size(codes.dim() - 1) : 0;
  }
  IXT_CHECK(is_group(group), "`group` must be 0, 32, 64, 128 or 256, got ", group);
  check_rows(codes, "codes");
  check_group_tensor(scale, "scale", codes, codes.size(codes.dim() - 1), group, dtype_codes().f32,
                     place);
  return group;
}

inline void check_dequantize_int4(const Tensor& codes, const Tensor& scale,
                                  const std::optional<Tensor>& zero, int64_t group, Place place) {
  check_dtype(codes, "codes", int_dtypes().u8);
  check_group(group);
  check_rows(codes, "codes");
  const int64_t bytes = codes.size(codes.dim() - 1);
  IXT_CHECK(2 * bytes % group == 0, "`codes` must have rows of a multiple of ", group / 2,
            " bytes for `group` ", group, ", got ", bytes);
  check_group_tensor(scale, "scale", codes, 2 * bytes, group, dtype_codes().f32, place);
  if (zero) check_group_tensor(*zero, "zero", codes, 2 * bytes, group, int_dtypes().u8, place);
}

// The arguments of update_fp8_scale, and what follows from them.
struct ScaleUpdate {
  int64_t length;
  int64_t columns;
  float largest;  // max_finite * 2^-margin, exact
  bool most_recent;
};

inline ScaleUpdate check_scale_update(const Tensor& history, const Tensor& scale, ScalarType dtype,
                                      int64_t margin, const std::string& algorithm) {
  check_dtype(history, "history", dtype_codes().f32);
  check_dtype(scale, "scale", dtype_codes().f32);
  const Fp8 format = fp8_dtype(dtype);
  check_device(scale, "scale", "history", place_of(history));
  const int64_t rank = history.dim();
  IXT_CHECK(rank == 1 || rank == 2, "`history` must have 1 or 2 dimensions, got ", rank);
  if (rank == 1) {
    IXT_CHECK(scale.numel() == 1, "`scale` must have one element, got ", shape_text(scale));
  } else {
    const std::vector<int64_t> shape{history.size(1)};
    IXT_CHECK(has_shape(scale, shape), "`scale` must have the shape ", shape_text(shape),
              ", got ", shape_text(scale));
  }
  IXT_CHECK(margin >= -100 && margin <= 100,
            "`margin` must be at least -100 and at most 100, got ", margin);
  IXT_CHECK(algorithm == "max" || algorithm == "most_recent",
            "`algorithm` must be \"max\" or \"most_recent\", got \"", algorithm, "\"");
  const float max_finite = format == Fp8::e4m3 ? E4M3::max_finite : E5M2::max_finite;
  return {history.size(0), rank == 1 ? 1 : history.size(1),
          std::ldexp(max_finite, static_cast<int>(-margin)), algorithm == "most_recent"};
}

inline void check_not_expanded(const Tensor& t, const char* name) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    IXT_CHECK(sizes[i] <= 1 || strides[i] != 0, "`", name,
              "` must not be expanded: it is written to");
  }
}

// The next scale for an amax.
IXT_HD float updated_scale(float amax, float largest, float old) {
  if (!(amax > 0.0f && amax <= kFloatMax)) return old;
  const float scale = div_ieee(largest, amax);
  return scale > kFloatMax ? kFloatMax : scale;
}

}  // namespace ixt
