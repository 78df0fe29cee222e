// NVFP4 on CUDA: argument checks, allocation, choice of kernel, registration.
//
// Nothing here waits for the GPU or reads a value of it, so every op can be captured in a graph.
#include <tuple>

#include "../common/nvfp4_args.h"
#include "nvfp4_launch.h"

namespace ixt {
namespace {

Fp4Source source_of(const Rows& x, Float in) {
  const int64_t per_vector = in == Float::f32 ? 4 : 8;
  const void* data = x.tensor.const_data_ptr();
  const bool wide = aligned16(data) && (x.rows <= 1 || x.stride % per_vector == 0);
  return {data, x.rows, x.cols, x.stride, wide};
}

// One orientation: its outputs, and what a kernel is told about them.
struct Orientation {
  Output codes;
  Output scales;
  Tensor amax;  // owns the data
  Fp4Result result;

  Orientation(const Tensor& x, const Tensor& amax_any, const char* amax_name, const Fp4Shape& shape,
              Place place)
      : codes(fp4_codes(x, shape, place)),
        scales(fp4_scales(x, shape, place)),
        amax(as_contiguous(amax_any)) {
    constexpr int64_t limit = int64_t{1} << 32;
    IXT_CHECK(shape.rows <= limit - 128 && shape.blocks <= limit - 128,
              "`x` must have less than 2^32 rows of the result, got ", shape.rows);
    const bool per_row = fp4_amax_per_row(amax_any, amax_name, x, "x", shape);
    result = {codes.data<uint8_t>(),
              scales.data<uint8_t>(),
              static_cast<const float*>(amax.const_data_ptr()),
              per_row,
              shape.gemm,
              static_cast<uint32_t>(shape.rows),
              static_cast<uint32_t>(shape.blocks),
              static_cast<uint32_t>(shape.scale_rows()),
              static_cast<uint32_t>(shape.scale_cols())};
  }
};

// Seed and offset on the device, contiguous.
class Rng {
 public:
  explicit Rng(const std::optional<Tensor>& rng) {
    if (rng.has_value()) data_ = as_contiguous(*rng);
  }
  const int64_t* data() const {
    return data_ ? static_cast<const int64_t*>(data_->const_data_ptr()) : nullptr;
  }

 private:
  std::optional<Tensor> data_;
};

using Pair = std::tuple<Output, Output>;
using TwoPairs = std::tuple<Output, Output, Output, Output>;

Pair quantize_nvfp4(const Tensor& x_any, const Tensor& amax, int64_t block_m, int64_t block_k,
                    bool transposed, const std::string& layout, bool hadamard,
                    const std::optional<Tensor>& rng_any) {
  const Fp4Shape shape = fp4_shape(x_any, block_m, block_k, transposed, layout, hadamard);
  check_fp4_rng(rng_any, x_any);
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  Orientation out(x_any, amax, "amax", shape, place);
  const Rows x = as_rows(x_any);
  const Rng rng(rng_any);
  const auto run = transposed ? launch_fp4_columns : launch_fp4_rows;
  run(source_of(x, in), out.result, {shape.square, hadamard, rng.data()}, in,
      current_stream(place.index));
  return {std::move(out.codes), std::move(out.scales)};
}

TwoPairs quantize_nvfp4_both(const Tensor& x_any, const Tensor& amax, const Tensor& amax_t,
                             bool square, const std::string& layout, bool hadamard,
                             const std::optional<Tensor>& rng_any) {
  const int64_t block = square ? kFp4Block : 1;
  const Fp4Shape along_k = fp4_shape(x_any, block, kFp4Block, false, layout, hadamard && square);
  const Fp4Shape along_m = fp4_shape(x_any, kFp4Block, block, true, layout, hadamard);
  check_fp4_rng(rng_any, x_any);
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  Orientation rows(x_any, amax, "amax", along_k, place);
  Orientation columns(x_any, amax_t, "amax_t", along_m, place);
  const Rows x = as_rows(x_any);
  const Rng rng(rng_any);
  launch_fp4_both(source_of(x, in), rows.result, columns.result, {square, hadamard, rng.data()}, in,
                  current_stream(place.index));
  return {std::move(rows.codes), std::move(rows.scales), std::move(columns.codes),
          std::move(columns.scales)};
}

Output amax_hadamard(const Tensor& x_any, bool transposed) {
  check_fp4_input(x_any);
  check_fp4_multiple(x_any, transposed);
  const Float in = float_dtype(x_any, "x");
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  const Rows x = as_rows(x_any);
  Output amax = empty(nullptr, 0, dtype_codes().f32, place);
  launch_fp4_amax(source_of(x, in), transposed, amax.data<float>(), in,
                  {place.index, current_stream(place.index)});
  return amax;
}

Output dequantize_nvfp4(const Tensor& codes_any, const Tensor& scales_any, const Tensor& amax_any,
                        int64_t block_m, int64_t block_k, ScalarType dtype,
                        const std::string& layout) {
  const Fp4Shape shape = fp4_codes_shape(codes_any, scales_any, block_m, block_k, layout);
  const Float out = float_dtype(dtype);
  Fp4Shape rows = shape;
  rows.square = false;  // here an amax a row makes sense for square blocks too
  const bool per_row = fp4_amax_per_row(amax_any, "amax", codes_any, "codes", rows);
  const Place place = place_of(codes_any);
  const DeviceScope scope(place.index);
  Tensor codes = as_contiguous(codes_any);
  if (reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 4 != 0) {
    codes = torch::stable::clone(codes);
  }
  Tensor scales = as_contiguous(scales_any);
  if (shape.gemm && !aligned16(scales.const_data_ptr())) scales = torch::stable::clone(scales);
  const Tensor amax = as_contiguous(amax_any);
  Output y = fp4_output(codes_any, shape, shape.blocks * kFp4Block, code_of(out), place);
  const Fp4Result q{static_cast<uint8_t*>(const_cast<void*>(codes.const_data_ptr())),
                    static_cast<uint8_t*>(const_cast<void*>(scales.const_data_ptr())),
                    static_cast<const float*>(amax.const_data_ptr()),
                    per_row,
                    shape.gemm,
                    static_cast<uint32_t>(shape.rows),
                    static_cast<uint32_t>(shape.blocks),
                    static_cast<uint32_t>(shape.scale_rows()),
                    static_cast<uint32_t>(shape.scale_cols())};
  launch_fp4_dequantize(q, shape.square, y.data(), out, current_stream(place.index));
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("quantize_nvfp4", ixt::Boxed<ixt::quantize_nvfp4>::call);
  m.impl("quantize_nvfp4_both", ixt::Boxed<ixt::quantize_nvfp4_both>::call);
  m.impl("amax_hadamard", ixt::Boxed<ixt::amax_hadamard>::call);
  m.impl("dequantize_nvfp4", ixt::Boxed<ixt::dequantize_nvfp4>::call);
}
