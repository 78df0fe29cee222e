// RMSNorm (with the residual sum before it, if wanted) and LayerNorm on CUDA.
//
// A block takes a row, which stays in its registers up to 4096 packs of 16 bytes; longer rows, and
// rows out of step with 16 bytes, are read again from the caches. The formulas are
// decompositions/norms.py's.
#include <algorithm>
#include <tuple>

#include "../common/like_args.h"
#include "floats.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kHeld = 4;  // packs a thread
constexpr int kMaxThreads = 1024;
constexpr int kLongThreads = 512;

struct NormArgs {
  const void* x;
  const void* residual;
  int64_t rows, cols, stride, residual_stride;
  void *y, *total;
  float *mean, *rstd;
  const void *weight, *bias;
  Float weight_dtype, bias_dtype;
  float eps, offset;
  bool wide;  // packs of 16 bytes only
};

// The packs of one row that belong to this thread; Held = 0: read again on every look.
template <typename T, bool Add, int Held, bool Wide>
class Row {
 public:
  __device__ __forceinline__ Row(const NormArgs& a, int64_t row) : a_(a), row_(row) {
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        if (place(i) < a.cols) held_[i] = read(place(i));
      }
    }
  }

  // f(pack, its first column)
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        if (place(i) < a_.cols) f(held_[i], place(i));
      }
    } else {
      for (int64_t at = place(0); at < a_.cols; at += int64_t{blockDim.x} * Pack<T>::N) {
        f(read(at), at);
      }
    }
  }

 private:
  __device__ __forceinline__ static int64_t place(int i) {
    return (int64_t{i} * blockDim.x + threadIdx.x) * Pack<T>::N;
  }

  __device__ __forceinline__ Pack<T> read(int64_t at) const {
    Pack<T> pack = load<Wide>(static_cast<const T*>(a_.x) + row_ * a_.stride, at, a_.cols);
    if constexpr (Add) {
      const T* other = static_cast<const T*>(a_.residual) + row_ * a_.residual_stride;
      const Pack<T> more = load<Wide>(other, at, a_.cols);
#pragma unroll
      for (int i = 0; i < Pack<T>::N; ++i) {
        pack.at[i] = rounded<T>(to_float(pack.at[i]) + to_float(more.at[i]));
      }
    }
    return pack;
  }

  const NormArgs& a_;
  int64_t row_;
  Pack<T> held_[Held > 0 ? Held : 1];
};

template <typename T, bool Add, int Held, bool Wide>
__device__ __forceinline__ float sum_of_squares(const Row<T, Add, Held, Wide>& row, int64_t cols,
                                                float mean, float* shared) {
  float sum[1] = {0.0f};
  row.each([&](const Pack<T>& pack, int64_t at) {
    const int count = inside<Wide, T>(at, cols);
    float squares[Pack<T>::N];
#pragma unroll
    for (int i = 0; i < Pack<T>::N; ++i) {
      const float v = to_float(pack.at[i]) - mean;
      squares[i] = i < count ? v * v : 0.0f;
    }
    sum[0] += pairwise_sum(squares);
  });
  block_sums(sum, shared);
  return sum[0];
}

template <typename T, bool Layer, bool Add, int Held, bool Wide>
__global__ void __launch_bounds__(kMaxThreads)
    normalize_rows(const __grid_constant__ NormArgs a) {
  constexpr int N = Pack<T>::N;
  __shared__ float shared[kWarp];
  const float count = static_cast<float>(a.cols);
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const Row<T, Add, Held, Wide> row(a, r);
    float mean = 0.0f;
    if constexpr (Layer) {
      float sum[1] = {0.0f};
      row.each([&](const Pack<T>& pack, int64_t) {
        float v[N];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = to_float(pack.at[i]);
        sum[0] += pairwise_sum(v);
      });
      block_sums(sum, shared);
      mean = sum[0] / count;
    }
    const float rstd = rsqrtf(sum_of_squares(row, a.cols, mean, shared) / count + a.eps);
    if (threadIdx.x == 0) {
      a.rstd[r] = rstd;
      if constexpr (Layer) a.mean[r] = mean;
    }
    row.each([&](const Pack<T>& pack, int64_t at) {
      float gain[N], shift[N];
      if (a.weight) load_any<Wide>(a.weight, a.weight_dtype, at, a.cols, gain);
      if (Layer && a.bias) load_any<Wide>(a.bias, a.bias_dtype, at, a.cols, shift);
      Pack<T> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float v = to_float(pack.at[i]);
        v = (Layer ? v - mean : v) * rstd;
        if (a.weight) v *= Layer ? gain[i] : gain[i] + a.offset;
        if (Layer && a.bias) v += shift[i];
        out.at[i] = rounded<T>(v);
      }
      if constexpr (Add) store<Wide>(static_cast<T*>(a.total) + r * a.cols, at, a.cols, pack);
      store<Wide>(static_cast<T*>(a.y) + r * a.cols, at, a.cols, out);
    });
  }
}

template <typename T, bool Layer, bool Add>
void run(const NormArgs& a, cudaStream_t stream) {
  const int64_t packs = (a.cols + Pack<T>::N - 1) / Pack<T>::N;
  const int64_t grid = std::min<int64_t>(a.rows, 0x7FFFFFFF);
  const int64_t wanted = (packs + kHeld - 1) / kHeld;
  const int64_t whole = std::max<int64_t>(1, (wanted + kWarp - 1) / kWarp) * kWarp;
  // The threads, and with them the order of the sums, depend on the row's length alone.
  const bool fits = whole <= kMaxThreads;
  const int threads = static_cast<int>(fits ? whole : kLongThreads);
  auto* kernel = !a.wide ? &normalize_rows<T, Layer, Add, 0, false>
                 : fits  ? &normalize_rows<T, Layer, Add, kHeld, true>
                         : &normalize_rows<T, Layer, Add, 0, true>;
  launch(kernel, grid, threads, stream, false, a);
}

NormArgs norm_args(const Rows& x, Float dtype, const Vector& weight, const Vector& bias) {
  NormArgs a{};
  a.x = x.tensor.const_data_ptr();
  a.rows = x.rows;
  a.cols = x.cols;
  a.stride = x.stride;
  a.weight = weight.data;
  a.weight_dtype = weight.dtype;
  a.bias = bias.data;
  a.bias_dtype = bias.dtype;
  const int64_t size = element_size(dtype);
  a.wide = x.cols * size % 16 == 0 && is_wide(a.x, x.rows, x.stride, size) &&
           aligned16(weight.data) && aligned16(bias.data);
  return a;
}

std::tuple<Output, Output> rms_norm(const Tensor& x, const std::optional<Tensor>& weight_any,
                                    double eps, double offset) {
  const Float dtype = float_dtype(x, "x");
  check_rank(x);
  const Vector weight = vector_arg(weight_any, "weight", x);
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const Rows rows = as_rows(x);
  Output y = empty_like(x, code_of(dtype), place);
  Output rstd = empty_per_row(x, place);
  NormArgs a = norm_args(rows, dtype, weight, {});
  a.y = y.data();
  a.rstd = rstd.data<float>();
  a.eps = eps_arg(eps);
  a.offset = static_cast<float>(offset);
  if (a.rows > 0) {
    with_type<bf16, f16>(dtype, [&](auto t) {
      run<decltype(t), false, false>(a, current_stream(place.index));
    });
  }
  return {std::move(y), std::move(rstd)};
}

std::tuple<Output, Output, Output> add_rms_norm(const Tensor& x, const Tensor& residual,
                                                const std::optional<Tensor>& weight_any, double eps,
                                                double offset) {
  const Float dtype = float_dtype(x, "x");
  check_rank(x);
  check_like(residual, "residual", x, "x");
  const Vector weight = vector_arg(weight_any, "weight", x);
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const Rows rows = as_rows(x);
  const Rows others = as_rows(residual);
  Output y = empty_like(x, code_of(dtype), place);
  Output total = empty_like(x, code_of(dtype), place);
  Output rstd = empty_per_row(x, place);
  NormArgs a = norm_args(rows, dtype, weight, {});
  a.residual = others.tensor.const_data_ptr();
  a.residual_stride = others.stride;
  a.wide = a.wide && is_wide(a.residual, a.rows, others.stride, element_size(dtype));
  a.y = y.data();
  a.total = total.data();
  a.rstd = rstd.data<float>();
  a.eps = eps_arg(eps);
  a.offset = static_cast<float>(offset);
  if (a.rows > 0) {
    with_type<bf16, f16>(dtype, [&](auto t) {
      run<decltype(t), false, true>(a, current_stream(place.index));
    });
  }
  return {std::move(y), std::move(total), std::move(rstd)};
}

std::tuple<Output, Output, Output> layer_norm(const Tensor& x,
                                              const std::optional<Tensor>& weight_any,
                                              const std::optional<Tensor>& bias_any, double eps) {
  const Float dtype = float_dtype(x, "x");
  check_rank(x);
  const Vector weight = vector_arg(weight_any, "weight", x);
  const Vector bias = vector_arg(bias_any, "bias", x);
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const Rows rows = as_rows(x);
  Output y = empty_like(x, code_of(dtype), place);
  Output mean = empty_per_row(x, place);
  Output rstd = empty_per_row(x, place);
  NormArgs a = norm_args(rows, dtype, weight, bias);
  a.y = y.data();
  a.mean = mean.data<float>();
  a.rstd = rstd.data<float>();
  a.eps = eps_arg(eps);
  if (a.rows > 0) {
    with_type<bf16, f16>(dtype, [&](auto t) {
      run<decltype(t), true, false>(a, current_stream(place.index));
    });
  }
  return {std::move(y), std::move(mean), std::move(rstd)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("rms_norm", ixt::Boxed<ixt::rms_norm>::call);
  m.impl("add_rms_norm", ixt::Boxed<ixt::add_rms_norm>::call);
  m.impl("layer_norm", ixt::Boxed<ixt::layer_norm>::call);
}
