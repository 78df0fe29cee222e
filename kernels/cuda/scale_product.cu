// What comes after an unscaled product, in one pass:
// cast(product * (scale_a * unit) * (scale_b * unit) + bias).
//
// Each step is rounded to fp32, in this order, as by PyTorch's elementwise kernels one after the
// other. The op is private: inductor_ext/ops/_scale_product.py calls it, and has the same in PyTorch.
#include <optional>

#include "../common/like_args.h"
#include "floats.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;

// A number for each row, column or for all, in steps of elements; `data` may be null.
struct Factors {
  const void* data;
  int64_t step;
};

struct ScaleArgs {
  const void* product;  // int32 or fp32
  void* out;            // (rows, cols), contiguous
  Factors a, b;         // fp32, of a row and of a column
  Factors bias;         // like out, of a column
  int64_t rows, cols, stride;  // stride: of the product
  float unit;
  int shift;        // log2 of the threads beside each other in a row
  uint32_t across;  // blocks beside each other
};

__device__ __forceinline__ float as_float(int32_t v) { return __int2float_rn(v); }
__device__ __forceinline__ float as_float(float v) { return v; }

// N numbers of a row of the product.
template <int N, typename P>
__device__ __forceinline__ void load_product(const P* __restrict__ from, float (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = as_float(__ldg(from));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const auto part = bit_copy<Pack<P>>(__ldg(reinterpret_cast<const uint4*>(from + i)));
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i + j] = as_float(part.at[j]);
    }
  }
}

// N numbers from column `at` on: one for all, or, where N > 1, beside each other and aligned.
template <int N, typename T>
__device__ __forceinline__ void load_factors(const Factors& f, int64_t at, float (&out)[N]) {
  const T* data = static_cast<const T*>(f.data);
  if (N > 1 && f.step == 1) {
    to_floats<true>(data + at, N, out);
    return;
  }
  const float value = to_float(data[at * f.step]);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = value;
}

// A thread takes N columns of `Unroll` rows; a block 1 << shift threads across, the others below.
template <typename P, typename T, int N, int Unroll>
__global__ void __launch_bounds__(kThreads) scale_product(const ScaleArgs a) {
  const uint32_t down = blockIdx.x / a.across;
  const uint32_t along = blockIdx.x - down * a.across;
  const int64_t col = ((int64_t{along} << a.shift) + (threadIdx.x & ((1 << a.shift) - 1))) * N;
  const int64_t below = kThreads >> a.shift;
  const int64_t first = down * below * Unroll + (threadIdx.x >> a.shift);
  if (col >= a.cols) return;
  const P* from = static_cast<const P*>(a.product) + first * a.stride + col;
  float v[Unroll][N];
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    if (first + u * below < a.rows) load_product<N>(from + u * below * a.stride, v[u]);
  }
  float scale_b[N], bias[N];
  load_factors<N, float>(a.b, col, scale_b);
#pragma unroll
  for (int i = 0; i < N; ++i) scale_b[i] = __fmul_rn(scale_b[i], a.unit);
  if (a.bias.data) load_factors<N, T>(a.bias, col, bias);
  T* to = static_cast<T*>(a.out) + first * a.cols + col;
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t row = first + u * below;
    if (row >= a.rows) return;
    const float* scale = static_cast<const float*>(a.a.data) + row * a.a.step;
    const float scale_a = __fmul_rn(__ldg(scale), a.unit);
    T made[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float scaled = __fmul_rn(__fmul_rn(v[u][i], scale_a), scale_b[i]);
      made[i] = rounded<T>(a.bias.data ? __fadd_rn(scaled, bias[i]) : scaled);
    }
    using Stored = Raw<N * sizeof(T)>;
    Stored raw;
    memcpy(&raw, made, sizeof(raw));
    *reinterpret_cast<Stored*>(to + u * below * a.cols) = raw;
  }
}

template <typename P, typename T, int N, int Unroll>
void run(ScaleArgs a, Target target) {
  const int64_t units = (a.cols + N - 1) / N;
  while (a.shift < 8 && int64_t{1} << a.shift < units) ++a.shift;
  const int64_t across = (units + (int64_t{1} << a.shift) - 1) >> a.shift;
  const int64_t tile = int64_t{kThreads >> a.shift} * Unroll;
  const int64_t blocks = across * ((a.rows + tile - 1) / tile);
  IXT_CHECK(blocks <= 0x7FFFFFFF, "`out` must have fewer elements, got ", a.rows * a.cols);
  a.across = static_cast<uint32_t>(across);
  launch(scale_product<P, T, N, Unroll>, blocks, kThreads, target.stream, false, a);
}

// A scale of one element, or of each of `count` rows or columns, in either direction.
Factors scale_arg(const Tensor& t, const char* name, const Tensor& out, int64_t count) {
  IXT_CHECK(dtype_code(t) == dtype_codes().f32, "`", name, "` must be float32, got ",
            dtype_name(dtype_code(t)));
  check_place(t, name, out, "out");
  if (t.numel() == 1) return {t.const_data_ptr(), 0};
  const int64_t along = t.dim() == 2 && t.size(0) == 1 ? 1 : 0;
  IXT_CHECK(t.dim() == 2 && t.size(along) == count && t.size(1 - along) == 1, "`", name,
            "` must have one element or the shape (", count, ", 1) or (1, ", count, "), got ",
            shape_text(t));
  return {t.const_data_ptr(), t.strides()[along]};
}

Factors bias_arg(const std::optional<Tensor>& t, const Tensor& out) {
  if (!t) return {nullptr, 0};
  IXT_CHECK(dtype_code(*t) == dtype_code(out), "`bias` must be ", dtype_name(dtype_code(out)),
            ", got ", dtype_name(dtype_code(*t)));
  check_place(*t, "bias", out, "out");
  IXT_CHECK(t->dim() == 1 && t->size(0) == out.size(1), "`bias` must have the shape (",
            out.size(1), ",), got ", shape_text(*t));
  return {t->const_data_ptr(), t->strides()[0]};
}

bool in_packs(const Factors& f) { return f.step == 0 || (f.step == 1 && aligned16(f.data)); }

std::tuple<> scale_product_(const Tensor& out, const Tensor& product, const Tensor& scale_a,
                            const Tensor& scale_b, const std::optional<Tensor>& bias,
                            double unit) {
  const Float dtype = float_dtype(out, "out");
  const int32_t summed = dtype_code(product);
  const bool integers = summed == aoti_torch_dtype_int32();
  IXT_CHECK(integers || summed == dtype_codes().f32,
            "`product` must be int32 or float32, got ", dtype_name(summed));
  check_place(product, "product", out, "out");
  IXT_CHECK(out.dim() == 2 && out.is_contiguous(), "`out` must be a contiguous matrix");
  ScaleArgs a{};
  a.rows = out.size(0);
  a.cols = out.size(1);
  IXT_CHECK(product.dim() == 2 && product.size(0) >= a.rows && product.size(1) >= a.cols &&
                (product.size(1) <= 1 || product.strides()[1] == 1),
            "`product` must have rows of elements beside each other, at least those of `out`, got ",
            shape_text(product));
  if (a.rows == 0 || a.cols == 0) return {};
  a.unit = static_cast<float>(unit);
  a.product = product.const_data_ptr();
  a.stride = product.strides()[0];
  a.out = out.mutable_data_ptr();
  a.a = scale_arg(scale_a, "scale_a", out, a.rows);
  a.b = scale_arg(scale_b, "scale_b", out, a.cols);
  a.bias = bias_arg(bias, out);
  const int64_t element = element_size(dtype);
  const bool wide = is_wide(a.product, a.rows, a.stride, 4) && a.cols * element % 16 == 0 &&
                    aligned16(a.out) && in_packs(a.b) && in_packs(a.bias);
  const Place place = place_of(out);
  const DeviceScope scope(place.index);
  const Target target{place.index, current_stream(place.index)};
  with_type<bf16, f16>(dtype, [&](auto t) {
    using T = decltype(t);
    const auto of = [&](auto p) {
      using P = decltype(p);
      wide ? run<P, T, kVector<T>, 4>(a, target) : run<P, T, 1, 8>(a, target);
    };
    integers ? of(int32_t{}) : of(float{});
  });
  return {};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("_scale_product_", ixt::Boxed<ixt::scale_product_>::call);
}
