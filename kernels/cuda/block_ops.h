// What the ops that scale blocks do on the host: argument checks, outputs, layouts of scales.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../common/scale_layout.h"
#include "blocks.h"

namespace ixt {

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

inline void check_has_rows(const Tensor& t, const char* name) {
  IXT_CHECK(t.dim() >= 1, "`", name, "` must have at least 1 dimension, got 0");
}

inline bool check_choice(const char* name, const std::string& value, const char* no,
                         const char* yes) {
  IXT_CHECK(value == no || value == yes, "`", name, "` must be \"", no, "\" or \"", yes,
            "\", got \"", value, "\"");
  return value == yes;
}

inline bool is_gemm(const std::string& layout) {
  return check_choice("layout", layout, "plain", "gemm");
}

inline std::string device_text(Place place) {
  if (place.type == aoti_torch_device_type_cpu()) return "cpu";
  return "cuda:" + std::to_string(place.index);
}

inline Target target_on(Place place) { return {place.index, current_stream(place.index)}; }

// The input of a quantize op, checked, as a matrix.
struct BlockInput {
  Float in;
  Fp8 out;
  Place place;
  Rows x;

  BlockInput(const Tensor& any, ScalarType dtype)
      : in(float_dtype(any, "x")), out(fp8_dtype(dtype)), place(place_of(any)), x(matrix(any)) {}

  BlockArgs args() const {
    BlockArgs a{};
    a.x = x.tensor.const_data_ptr();
    a.rows = x.rows;
    a.cols = x.cols;
    a.stride = x.stride;
    return a;
  }

 private:
  static Rows matrix(const Tensor& any) {
    check_has_rows(any, "x");
    const DeviceScope scope(any.get_device_index());  // a copy may have to be made
    return as_rows(any);
  }
};

inline Output empty_matrix(int64_t rows, int64_t cols, int32_t dtype, Place place) {
  const int64_t sizes[2] = {rows, cols};
  return empty(sizes, 2, dtype, place);
}

inline Output empty_codes(const Tensor& x, const BlockInput& input, bool transposed) {
  if (!transposed) return empty_like(x, code_of(input.out), input.place);
  return empty_matrix(input.x.cols, input.x.rows, code_of(input.out), input.place);
}

// How the scales of one result are laid out.
struct ScaleSpec {
  int side;         // see blocks.h
  bool transposed;  // the codes they belong to
  int group;
  bool square;
  bool mx;
  bool gemm;
};

struct Scales {
  Output tensor;
  ScaleView view;
};

inline Scales strided_scales(const ScaleSpec& spec, int64_t lines, int64_t blocks, int32_t dtype,
                             const Tensor& x, Place place) {
  ScaleView view{nullptr, spec.mx ? ScaleForm::e8m0 : ScaleForm::fp32, lines, blocks, 0, 0, 0};
  // A line lies along the rows of its codes, or across them.
  const bool along = spec.square || spec.side == (spec.transposed ? 1 : 0);
  const int64_t pitch = spec.square && spec.gemm ? round_up(blocks, 4) : blocks;
  view.padding = pitch - blocks;
  const bool column_major = spec.gemm && !spec.square;
  if (along != column_major) {
    view.line = pitch, view.block = 1;
  } else {
    view.line = 1, view.block = lines;
  }
  if (along && spec.side == 0 && !spec.square && !spec.gemm) {  // (*x.shape[:-1], blocks)
    const auto sizes = x.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    shape.back() = blocks;
    Output out = empty(shape.data(), static_cast<int64_t>(shape.size()), dtype, place);
    view.data = out.data();
    return {std::move(out), view};
  }
  const int64_t sizes[2] = {along ? lines : blocks, along ? pitch : lines};
  const int64_t strides[2] = {1, sizes[0] > 1 ? sizes[0] : 1};
  AtenTensorHandle handle = nullptr;
  if (column_major) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, dtype, place.type,
                                                    place.index, &handle));
  }
  Output out = column_major ? Output(handle) : empty(sizes, 2, dtype, place);
  view.data = out.data();
  return {std::move(out), view};
}

inline Scales make_scales(const ScaleSpec& spec, const Tensor& x, const BlockInput& input) {
  const int64_t rows = input.x.rows;
  const int64_t cols = input.x.cols;
  int64_t lines = spec.side ? cols : rows;
  const int64_t blocks = ceil_div(spec.side ? rows : cols, spec.group);
  if (spec.mx && spec.gemm) {
    Output out = empty_matrix(round_up(lines, kSwizzleRows), round_up(blocks, kSwizzleCols),
                              aoti_torch_dtype_uint8(), input.place);
    const ScaleView view{out.data(), ScaleForm::swizzled, lines, blocks, 0, 0, 0};
    return {std::move(out), view};
  }
  if (spec.square) lines = ceil_div(lines, spec.group);
  const int32_t dtype = spec.mx ? aoti_torch_dtype_uint8() : dtype_codes().f32;
  return strided_scales(spec, lines, blocks, dtype, x, input.place);
}

using Quantized = std::tuple<Output, Output>;
using QuantizedBoth = std::tuple<Output, Output, Output, Output>;

struct BlockShape {
  int64_t m;
  int64_t k;
  bool square() const { return m == k; }
  int group() const { return static_cast<int>(m > k ? m : k); }
};

// One orientation.
Quantized quantize_blocks(const Tensor& x, const BlockInput& input, BlockShape block,
                          bool transposed, const BlockRule& rule, bool gemm);

// Along rows and along columns, the second half transposed or not; or square blocks for both.
QuantizedBoth quantize_blocks_both(const Tensor& x, const BlockInput& input, int group, bool square,
                                   bool transposed, const BlockRule& rule, bool gemm);

// `dtype` and `name` are those of the scales.
Output dequantize_blocks(const Tensor& codes, const Tensor& scales, const char* name, int32_t dtype,
                         BlockShape block, ScalarType result, bool gemm);

}  // namespace ixt
