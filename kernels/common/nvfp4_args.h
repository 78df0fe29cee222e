// Argument checks and shapes of the NVFP4 ops; the words are those of inductor_ext/ops/nvfp4.py.
#pragma once

#include <optional>

#include "nvfp4.h"
#include "op_args.h"
#include "scale_layout.h"

namespace ixt {

// What one orientation makes: `rows` rows of `blocks` blocks of 16 elements.
struct Fp4Shape {
  int64_t rows = 0;
  int64_t blocks = 0;
  bool transposed = false;
  bool square = false;
  bool gemm = false;

  int64_t scale_rows() const {
    if (gemm) return round_up(rows, kSwizzleRows);
    return square ? (rows + kFp4Block - 1) / kFp4Block : rows;
  }
  int64_t scale_cols() const { return gemm ? round_up(blocks, kSwizzleCols) : blocks; }
};

inline bool fp4_layout(const std::string& layout) {
  IXT_CHECK(layout == "plain" || layout == "gemm",
            "`layout` must be \"plain\" or \"gemm\", got \"", layout, "\"");
  return layout == "gemm";
}

inline void check_fp4_place(const Tensor& t, const char* name, const char* other, Place place) {
  const Place own = place_of(t);
  IXT_CHECK(own.type == place.type && own.index == place.index, "`", name,
            "` must be on the device of `", other, "`, got another one");
}

// True when there is an amax a row of the result.
inline bool fp4_amax_per_row(const Tensor& amax, const char* name, const Tensor& x,
                             const char* x_name, const Fp4Shape& shape) {
  IXT_CHECK(dtype_code(amax) == dtype_codes().f32, "`", name, "` must be float32, got ",
            dtype_name(dtype_code(amax)));
  check_fp4_place(amax, name, x_name, place_of(x));
  if (amax.numel() == 1) return false;
  const auto sizes = amax.sizes();
  IXT_CHECK(!shape.square, "`", name, "` must have one element for blocks of 16x16, got ",
            shape_text(amax));
  std::vector<int64_t> expected{shape.rows, 1};
  if (!shape.transposed) {
    const auto xs = x.sizes();
    expected.assign(xs.begin(), xs.end());
    expected.back() = 1;
  }
  bool ok = sizes.size() == expected.size();
  for (size_t i = 0; ok && i < expected.size(); ++i) ok = sizes[i] == expected[i];
  IXT_CHECK(ok, "`", name, "` must have one element or the shape ", shape_text(expected), ", ",
            shape.transposed ? "an amax for each column of `" : "a scale for each row of `", x_name,
            "`, got ", shape_text(amax));
  return true;
}

inline void check_fp4_multiple(const Tensor& x, bool transposed) {
  const int64_t size = transposed ? row_count(x) : x.size(x.dim() - 1);
  IXT_CHECK(size % kFp4Block == 0, "`x` must have a multiple of 16 ",
            transposed ? "rows (the product of all dimensions but the last)" : "columns", ", got ",
            size, "; padded with zeros to ", round_up(size, kFp4Block), " it works");
}

inline void check_fp4_input(const Tensor& x) {
  float_dtype(x, "x");
  IXT_CHECK(x.dim() >= 1, "`x` must have at least 1 dimension, got 0");
}

inline Fp4Shape fp4_shape(const Tensor& x, int64_t block_m, int64_t block_k, bool transposed,
                          const std::string& layout, bool hadamard) {
  check_fp4_input(x);
  const bool square = block_m == kFp4Block && block_k == kFp4Block;
  const bool vectors = transposed ? block_m == kFp4Block && block_k == 1
                                  : block_m == 1 && block_k == kFp4Block;
  IXT_CHECK(square || vectors,
            "(`block_m`, `block_k`) must be (1, 16), (16, 1) with transposed=True, or (16, 16), "
            "got (", block_m, ", ", block_k, ") with transposed=", transposed ? "True" : "False");
  const bool gemm = fp4_layout(layout);
  IXT_CHECK(!(hadamard && square), "`hadamard` must be False for blocks of 16x16, got True");
  check_fp4_multiple(x, transposed);
  const int64_t rows = row_count(x);
  const int64_t cols = x.size(x.dim() - 1);
  return {transposed ? cols : rows, (transposed ? rows : cols) / kFp4Block, transposed, square,
          gemm};
}

inline void check_fp4_rng(const std::optional<Tensor>& rng, const Tensor& x) {
  if (!rng.has_value()) return;
  IXT_CHECK(dtype_code(*rng) == aoti_torch_dtype_int64(), "`rng` must be int64, got ",
            dtype_name(dtype_code(*rng)));
  check_fp4_place(*rng, "rng", "x", place_of(x));
  IXT_CHECK(rng->dim() == 1 && rng->numel() == 2,
            "`rng` must have the shape (2,), seed and offset, got ", shape_text(*rng));
}

// (*, last) or, transposed, (rows, last).
inline Output fp4_output(const Tensor& x, const Fp4Shape& shape, int64_t last, int32_t dtype,
                         Place place) {
  const auto sizes = x.sizes();
  std::vector<int64_t> result{shape.rows, last};
  if (!shape.transposed) {
    result.assign(sizes.begin(), sizes.end());
    result.back() = last;
  }
  return empty(result.data(), static_cast<int64_t>(result.size()), dtype, place);
}

inline Output fp4_codes(const Tensor& x, const Fp4Shape& shape, Place place) {
  return fp4_output(x, shape, shape.blocks * (kFp4Block / 2), aoti_torch_dtype_uint8(), place);
}

inline Output fp4_scales(const Tensor& x, const Fp4Shape& shape, Place place) {
  if (!shape.gemm && !shape.square) {
    return fp4_output(x, shape, shape.blocks, dtype_codes().e4m3, place);
  }
  const int64_t sizes[] = {shape.scale_rows(), shape.scale_cols()};
  return empty(sizes, 2, dtype_codes().e4m3, place);
}

// The shape of the codes given to dequantize, whose scales are checked.
inline Fp4Shape fp4_codes_shape(const Tensor& codes, const Tensor& scales, int64_t block_m,
                                int64_t block_k, const std::string& layout) {
  IXT_CHECK(dtype_code(codes) == aoti_torch_dtype_uint8(), "`codes` must be uint8, got ",
            dtype_name(dtype_code(codes)));
  IXT_CHECK(codes.dim() >= 1, "`codes` must have at least 1 dimension, got 0");
  const int64_t bytes = codes.size(codes.dim() - 1);
  IXT_CHECK(bytes % 8 == 0, "`codes` must have a multiple of 8 columns (16 elements), got ", bytes);
  IXT_CHECK(block_k == kFp4Block && (block_m == 1 || block_m == kFp4Block),
            "(`block_m`, `block_k`) must be (1, 16) or (16, 16), got (", block_m, ", ", block_k,
            ")");
  const Fp4Shape shape{row_count(codes), bytes / 8, false, block_m == kFp4Block,
                       fp4_layout(layout)};
  IXT_CHECK(dtype_code(scales) == dtype_codes().e4m3, "`scales` must be float8_e4m3fn, got ",
            dtype_name(dtype_code(scales)));
  check_fp4_place(scales, "scales", "codes", place_of(codes));
  std::vector<int64_t> expected{shape.scale_rows(), shape.scale_cols()};
  if (!shape.gemm && !shape.square) {
    const auto sizes = codes.sizes();
    expected.assign(sizes.begin(), sizes.end());
    expected.back() = shape.blocks;
  }
  const auto sizes = scales.sizes();
  bool ok = sizes.size() == expected.size();
  for (size_t i = 0; ok && i < expected.size(); ++i) ok = sizes[i] == expected[i];
  IXT_CHECK(ok, "`scales` must have the shape ", shape_text(expected), ", got ",
            shape_text(scales));
  return shape;
}

}  // namespace ixt
