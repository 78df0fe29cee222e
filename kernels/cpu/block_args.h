// What the ops that scale blocks of a matrix do on the host: arguments, shapes, scale layouts.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../common/op_args.h"
#include "../common/scale_layout.h"

namespace ixt {

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Elements of a block of the matrix (M, K).
struct Block {
  int64_t m;
  int64_t k;
  bool square() const { return m == k; }
};

// How many blocks a matrix has.
struct Grid {
  int64_t m;
  int64_t k;
};

inline Grid grid_of(int64_t rows, int64_t cols, Block block) {
  return {ceil_div(rows, block.m), ceil_div(cols, block.k)};
}

inline void check_rank(const Tensor& t, const char* name) {
  IXT_CHECK(t.dim() >= 1, "`", name, "` must have at least 1 dimension, got 0");
}

// Check the dtype and the device of the scales that came with `codes`.
inline void check_scales(const Tensor& scales, const char* name, int32_t dtype,
                         const Tensor& codes) {
  IXT_CHECK(dtype_code(scales) == dtype, "`", name, "` must be ", dtype_name(dtype),
            ", got ", dtype_name(dtype_code(scales)));
  const Place here = place_of(codes);
  const Place there = place_of(scales);
  IXT_CHECK(here.type == there.type && here.index == there.index, "`", name,
            "` must be on the device of `codes`, got another device");
}

inline void check_shape(const Tensor& scales, const char* name, const std::vector<int64_t>& shape) {
  const auto sizes = scales.sizes();
  const bool same = std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
  IXT_CHECK(same, "`", name, "` must have the shape ", shape_text(shape), ", got ",
            shape_text(scales));
}

inline void check_fp8_block(Block block) {
  const int64_t group = std::max(block.m, block.k);
  const int64_t other = std::min(block.m, block.k);
  IXT_CHECK((group == 32 || group == 64 || group == 128) && (other == 1 || other == group),
            "`block_m` and `block_k` must be (1, G), (G, 1) or (G, G) with G = 32, 64 or 128, got (",
            block.m, ", ", block.k, ")");
}

// True for "gemm", what cuBLASLt takes, false for "plain".
inline bool is_gemm(const std::string& layout) {
  IXT_CHECK(layout == "plain" || layout == "gemm", "`layout` must be \"plain\" or \"gemm\", got \"",
            layout, "\"");
  return layout == "gemm";
}

// As is_gemm, for FP8, whose columns of blocks a GEMM takes transposed only.
inline bool is_fp8_gemm(const std::string& layout, bool columns) {
  const bool gemm = is_gemm(layout);
  IXT_CHECK(!(gemm && columns),
            "`layout` must be \"plain\" for G x 1 blocks of codes that are not transposed (a GEMM "
            "takes them transposed), got \"gemm\"");
  return gemm;
}

inline Output empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            int32_t dtype, Place place) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, place.type, place.index,
                                                  &handle));
  return Output(handle);
}

inline Output empty_matrix(int64_t rows, int64_t cols, int32_t dtype, Place place) {
  const int64_t sizes[2] = {rows, cols};
  return empty(sizes, 2, dtype, place);
}

// Codes like x, or contiguous (K, M).
inline Output empty_codes(const Tensor& x, bool transposed, int32_t dtype, Place place) {
  if (!transposed) return empty_like(x, dtype, place);
  return empty_matrix(x.sizes()[x.dim() - 1], row_count(x), dtype, place);
}

// Shape of plain scales that are not transposed.
inline std::vector<int64_t> scale_shape(const Tensor& x, Grid grid, Block block) {
  if (block.m != 1) return {grid.m, grid.k};
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = grid.k;
  return shape;
}

// Plain scales: one for each block of the matrix or, transposed, of its transpose.
inline Output empty_scales(const Tensor& x, Grid grid, Block block, bool transposed, int32_t dtype,
                           Place place) {
  if (transposed) return empty_matrix(grid.k, grid.m, dtype, place);
  const std::vector<int64_t> shape = scale_shape(x, grid, block);
  return empty(shape.data(), static_cast<int64_t>(shape.size()), dtype, place);
}

// Where the scale of block (i, j) lies, in blocks of (M, K) whatever the orientation of the result.
template <typename T>
struct StridedScales {
  T* data;
  int64_t m_step;
  int64_t k_step;

  T& at(int64_t i, int64_t j) const { return data[i * m_step + j * k_step]; }

  // Stores those of rows x cols blocks from (i, j) on.
  void put(int64_t i, int64_t j, int64_t rows, int64_t cols, const T* values, int64_t step) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) at(i + r, j + c) = values[r * step + c];
    }
  }
};

// Stores in two places: square blocks of a matrix are those of its transpose.
template <typename Scales>
struct TwiceScales {
  Scales first;
  Scales second;

  template <typename T>
  void put(int64_t i, int64_t j, int64_t rows, int64_t cols, const T* values, int64_t step) const {
    first.put(i, j, rows, cols, values, step);
    second.put(i, j, rows, cols, values, step);
  }
};

template <typename Scales>
TwiceScales(Scales, Scales) -> TwiceScales<Scales>;

}  // namespace ixt
