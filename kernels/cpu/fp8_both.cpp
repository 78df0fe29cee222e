// FP8 with a transpose beside the codes, and with a scale a column, on the CPU.
#include <tuple>

#include "fp8_loops.h"
#include "fp8_scaling.h"

namespace ixt {
namespace {

const Fp8Loops& flat_loops(Float dtype) {
  static const Fp8LoopTable* best = IXT_BEST_OF(fp8_loops);
  return loops_of(*best, dtype);
}

// One scale for all: codes and their transpose.
class WholeQuantizer {
 public:
  WholeQuantizer(const Matrix& x, Fp8 out, float scale, CodesTo codes)
      : x_(x),
        quantize_(loops_of(block_loop_table(), x.dtype()).quantize_columns[static_cast<int>(out)]),
        codes_(codes) {
    std::fill_n(scale_, kTileCols, scale);
  }

  void operator()(const Area& area) const {
    write_codes(codes_, area, [&](uint8_t* q, int64_t stride) {
      quantize_(x_.tile(area), scale_, q, stride);
    });
  }

 private:
  Matrix x_;
  decltype(+BlockLoops{}.quantize_columns[0]) quantize_;
  CodesTo codes_;
  float scale_[kTileCols];
};

// Amax of each column of bands of kTileRows rows, then of them all.
std::vector<float> column_amax(const Rows& x, const Matrix& matrix) {
  const BlockLoops& loops = loops_of(block_loop_table(), matrix.dtype());
  const int64_t bands = ceil_div(x.rows, kTileRows);
  std::vector<float> partial(bands * x.cols);
  for_tall_tiles(x.rows, x.cols, [&](const Area& a) {
    loops.amax_columns(matrix.tile(a), &partial[a.m / kTileRows * x.cols + a.k]);
  });
  std::vector<float> amax(x.cols);
  block_loop_table().f32.amax_columns({partial.data(), x.cols, bands, x.cols}, amax.data());
  return amax;
}

float whole_amax(const Rows& x, const Matrix& matrix) {
  const Fp8Loops& loops = flat_loops(matrix.dtype());
  const int64_t across = ceil_div(x.cols, kFlatCols);
  std::vector<float> partial(x.rows * across);
  for_flat_tiles(x.rows, x.cols, [&](const Area& a) {
    for (int64_t r = a.m; r < a.m + a.rows; ++r) {
      const Tile row = matrix.tile({r, a.k, 1, a.cols});
      partial[r * across + a.k / kFlatCols] = loops.amax(row.data, row.cols);
    }
  });
  return partial.empty() ? 0.0f : *std::max_element(partial.begin(), partial.end());
}

using Static = std::tuple<Output, Output, Output, Output>;
using Current = std::tuple<Output, Output, Output>;
using Column = std::tuple<Output, Output>;

Static quantize_fp8_static_both(const Tensor& x_any, const Tensor& scale, ScalarType dtype) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  IXT_CHECK(dtype_code(scale) == dtype_codes().f32, "`scale` must be float32, got ",
            dtype_name(dtype_code(scale)));
  IXT_CHECK(scale.numel() == 1, "`scale` must have one element, got the shape ",
            shape_text(scale));
  const Place place = place_of(x_any);
  const Place other = place_of(scale);
  IXT_CHECK(other.type == place.type && other.index == place.index,
            "`scale` must be on the device of `x`, got another device");
  const Rows x = as_rows(x_any);
  const Matrix matrix(x, in);
  Output codes = empty_codes(x_any, false, code_of(out), place);
  Output codes_t = empty_codes(x_any, true, code_of(out), place);
  Output scale_inv = empty_like(scale, dtype_codes().f32, place);
  Output amax = empty_like(scale, dtype_codes().f32, place);
  const float s = *static_cast<const float*>(scale.const_data_ptr());
  const CodesTo to{codes.data<uint8_t>(), codes_t.data<uint8_t>(), x.rows, x.cols};
  const WholeQuantizer quantize(matrix, out, s, to);
  const BlockLoops& loops = loops_of(block_loop_table(), in);
  const int64_t across = ceil_div(x.cols, kTileCols);
  std::vector<float> partial(ceil_div(x.rows, kTileRows) * across + 1, 0.0f);
  for_tall_tiles(x.rows, x.cols, [&](const Area& a) {
    float columns[kTileCols];
    loops.amax_columns(matrix.tile(a), columns);
    partial[a.m / kTileRows * across + a.k / kTileCols] =
        *std::max_element(columns, columns + a.cols);
    quantize(a);
  });
  *amax.data<float>() = *std::max_element(partial.begin(), partial.end());
  *scale_inv.data<float>() = 1.0f / s;
  return {std::move(codes), std::move(codes_t), std::move(scale_inv), std::move(amax)};
}

Current quantize_fp8_tensor_both(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Fp8Scaling scaling(out, scale_rule(eps, pow2, kFloatMax));
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  const Matrix matrix(x, in);
  Output codes = empty_codes(x_any, false, code_of(out), place);
  Output codes_t = empty_codes(x_any, true, code_of(out), place);
  Output scale_inv = empty(nullptr, 0, dtype_codes().f32, place);
  const float amax = whole_amax(x, matrix);
  float scale = 1.0f;
  scaling(&amax, 1, &scale, scale_inv.data<float>());
  const CodesTo to{codes.data<uint8_t>(), codes_t.data<uint8_t>(), x.rows, x.cols};
  for_tall_tiles(x.rows, x.cols, WholeQuantizer(matrix, out, scale, to));
  return {std::move(codes), std::move(codes_t), std::move(scale_inv)};
}

Column quantize_fp8_column(const Tensor& x_any, ScalarType dtype, bool transposed, double eps,
                           bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  check_rank(x_any, "x");
  const Fp8Scaling scaling(out, scale_rule(eps, pow2, max_finite(in)));
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  const Matrix matrix(x, in);
  Output codes = empty_codes(x_any, transposed, code_of(out), place);
  Output scale_inv = transposed ? empty_matrix(x.cols, 1, dtype_codes().f32, place)
                                : empty_matrix(1, x.cols, dtype_codes().f32, place);
  const std::vector<float> amax = column_amax(x, matrix);
  std::vector<float> scale(x.cols);
  scaling(amax.data(), x.cols, scale.data(), scale_inv.data<float>());
  const auto quantize =
      loops_of(block_loop_table(), in).quantize_columns[static_cast<int>(out)];
  auto* q = codes.data<uint8_t>();
  const CodesTo to{transposed ? nullptr : q, transposed ? q : nullptr, x.rows, x.cols};
  const auto write = [&](const Area& a) {
    write_codes(to, a, [&](uint8_t* tile, int64_t stride) {
      quantize(matrix.tile(a), scale.data() + a.k, tile, stride);
    });
  };
  if (transposed) {
    for_tall_tiles(x.rows, x.cols, write);
  } else {
    for_flat_tiles(x.rows, x.cols, write);
  }
  return {std::move(codes), std::move(scale_inv)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("quantize_fp8_static_both", ixt::Boxed<ixt::quantize_fp8_static_both>::call);
  m.impl("quantize_fp8_tensor_both", ixt::Boxed<ixt::quantize_fp8_tensor_both>::call);
  m.impl("quantize_fp8_column", ixt::Boxed<ixt::quantize_fp8_column>::call);
}
