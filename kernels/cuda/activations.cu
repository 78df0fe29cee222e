// Activations, gated ones, and their backwards on CUDA: streams of 16-byte packs.
//
// Tensors whose rows follow each other are one long row; halves of a wider tensor, as a gated MLP
// takes them, are read where they are. A block takes one tile and ends.
#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "../common/like_args.h"
#include "activations.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // packs a thread

template <int In, int Out>
struct StreamArgs {
  const void* in[In];
  int64_t stride[In];  // elements between rows
  void* out[Out];      // contiguous
  int64_t rows, cols;
  int64_t row_packs;
  bool wide;
};

// f(floats of the inputs, floats of the outputs), for one element
template <typename T, bool Wide, int In, int Out, typename F>
__device__ __forceinline__ void stream(const StreamArgs<In, Out>& a, const F& f) {
  constexpr int N = Pack<T>::N;
  const int64_t packs = a.rows * a.row_packs;
  const int64_t first = blockIdx.x * int64_t{kThreads * kUnroll} + threadIdx.x;
  Pack<T> held[kUnroll][In];
  int64_t row[kUnroll], at[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t pack = first + u * kThreads;
    row[u] = 0;
    at[u] = pack * N;
    if (pack >= packs) continue;
    if (a.rows > 1) {  // 32-bit division is several times cheaper
      row[u] = packs <= 0xFFFFFFFFll
                   ? static_cast<uint32_t>(pack) / static_cast<uint32_t>(a.row_packs)
                   : pack / a.row_packs;
      at[u] = (pack - row[u] * a.row_packs) * N;
    }
#pragma unroll
    for (int i = 0; i < In; ++i) {
      const T* from = static_cast<const T*>(a.in[i]) + row[u] * a.stride[i];
      held[u][i] = load<Wide>(from, at[u], a.cols);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kThreads >= packs) continue;
    Pack<T> made[Out];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float in[In], out[Out];
#pragma unroll
      for (int i = 0; i < In; ++i) in[i] = to_float(held[u][i].at[j]);
      f(in, out);
#pragma unroll
      for (int i = 0; i < Out; ++i) made[i].at[j] = rounded<T>(out[i]);
    }
#pragma unroll
    for (int i = 0; i < Out; ++i) {
      store<Wide>(static_cast<T*>(a.out[i]) + row[u] * a.cols, at[u], a.cols, made[i]);
    }
  }
}

template <typename T, typename F, bool Gated, bool Wide>
__global__ void __launch_bounds__(kThreads)
    activate(const __grid_constant__ StreamArgs<1 + Gated, 1> a) {
  stream<T, Wide>(a, [](const float(&in)[1 + Gated], float(&out)[1]) {
    out[0] = F::value(in[0]);
    if constexpr (Gated) out[0] *= in[1];
  });
}

// Inputs: grad, a and, gated, b.
template <typename T, typename F, bool Gated, bool Wide>
__global__ void __launch_bounds__(kThreads)
    activate_backward(const __grid_constant__ StreamArgs<2 + Gated, 1 + Gated> a) {
  stream<T, Wide>(a, [](const float(&in)[2 + Gated], float(&out)[1 + Gated]) {
    float value, slope;
    F::both(in[1], value, slope);
    if constexpr (Gated) {
      out[0] = in[0] * in[2] * slope;
      out[1] = in[0] * value;
    } else {
      out[0] = in[0] * slope;
    }
  });
}

template <int In, int Out>
StreamArgs<In, Out> stream_args(const std::array<Rows, In>& in,
                                const std::array<void*, Out>& out, Float dtype) {
  StreamArgs<In, Out> a{};
  const bool flat = std::all_of(in.begin(), in.end(), [](const Rows& r) {
    return r.rows == 1 || r.stride == r.cols;
  });
  a.rows = flat ? 1 : in[0].rows;
  a.cols = flat ? in[0].rows * in[0].cols : in[0].cols;
  std::copy(out.begin(), out.end(), a.out);
  const int64_t size = element_size(dtype);
  a.wide = a.cols * size % 16 == 0;
  for (int i = 0; i < In; ++i) {
    a.in[i] = in[i].tensor.const_data_ptr();
    a.stride[i] = in[i].stride;
    a.wide = a.wide && is_wide(a.in[i], a.rows, a.stride[i], size);
  }
  a.row_packs = (a.cols * size + 15) / 16;
  return a;
}

template <int In, int Out>
void launch_stream(void (*kernel)(StreamArgs<In, Out>), const StreamArgs<In, Out>& a,
                   Place place) {
  const int64_t packs = a.rows * a.row_packs;
  if (packs == 0) return;
  constexpr int64_t tile = kThreads * kUnroll;
  launch(kernel, (packs + tile - 1) / tile, kThreads, current_stream(place.index), false, a);
}

template <typename F, bool Gated>
Output forward(const std::array<Rows, 1 + Gated>& in, const Tensor& x) {
  const Float dtype = float_dtype(x, "x");
  const Place place = place_of(x);
  Output y = empty_like(x, code_of(dtype), place);
  const auto a = stream_args<1 + Gated, 1>(in, {y.data()}, dtype);
  with_type<bf16, f16>(dtype, [&](auto t) {
    using T = decltype(t);
    launch_stream(a.wide ? activate<T, F, Gated, true> : activate<T, F, Gated, false>, a, place);
  });
  return y;
}

template <typename F, bool Gated>
void backward(const std::array<Rows, 2 + Gated>& in, const std::array<void*, 1 + Gated>& out,
              Float dtype, Place place) {
  const auto a = stream_args<2 + Gated, 1 + Gated>(in, out, dtype);
  with_type<bf16, f16>(dtype, [&](auto t) {
    using T = decltype(t);
    auto* kernel = a.wide ? activate_backward<T, F, Gated, true>
                          : activate_backward<T, F, Gated, false>;
    launch_stream(kernel, a, place);
  });
}

// A 0-d tensor is a row of one element.
Rows rows_of(const Tensor& t) {
  if (t.dim() > 0) return as_rows(t);
  return {t, 1, 1, 1};
}

template <typename F>
Output unary(const Tensor& x) {
  float_dtype(x, "x");
  const DeviceScope scope(place_of(x).index);
  return forward<F, false>({rows_of(x)}, x);
}

template <typename F>
Output unary_backward(const Tensor& grad, const Tensor& x) {
  const Float dtype = float_dtype(x, "x");
  check_like(grad, "grad", x, "x");
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  Output dx = empty_like(x, code_of(dtype), place);
  backward<F, false>({rows_of(grad), rows_of(x)}, {dx.data()}, dtype, place);
  return dx;
}

template <typename F>
Output gated(const Tensor& a, const Tensor& b) {
  float_dtype(a, "a");
  check_like(b, "b", a, "a");
  const DeviceScope scope(place_of(a).index);
  return forward<F, true>({rows_of(a), rows_of(b)}, a);
}

using Pair = std::tuple<Output, Output>;

template <typename F>
Pair gated_backward(const Tensor& grad, const Tensor& a, const Tensor& b) {
  const Float dtype = float_dtype(a, "a");
  check_like(b, "b", a, "a");
  check_like(grad, "grad", a, "a");
  const Place place = place_of(a);
  const DeviceScope scope(place.index);
  Output da = empty_like(a, code_of(dtype), place);
  Output db = empty_like(a, code_of(dtype), place);
  backward<F, true>({rows_of(grad), rows_of(a), rows_of(b)}, {da.data(), db.data()}, dtype, place);
  return {std::move(da), std::move(db)};
}

bool is_tanh(const std::string& approximate) {
  IXT_CHECK(approximate == "none" || approximate == "tanh",
            "`approximate` must be \"none\" or \"tanh\", got '", approximate, "'");
  return approximate == "tanh";
}

Output gelu(const Tensor& x, const std::string& approximate) {
  return is_tanh(approximate) ? unary<GeluTanh>(x) : unary<GeluErf>(x);
}

Output gelu_backward(const Tensor& grad, const Tensor& x, const std::string& approximate) {
  return is_tanh(approximate) ? unary_backward<GeluTanh>(grad, x)
                              : unary_backward<GeluErf>(grad, x);
}

Output geglu(const Tensor& a, const Tensor& b, const std::string& approximate) {
  return is_tanh(approximate) ? gated<GeluTanh>(a, b) : gated<GeluErf>(a, b);
}

Pair geglu_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                    const std::string& approximate) {
  return is_tanh(approximate) ? gated_backward<GeluTanh>(grad, a, b)
                              : gated_backward<GeluErf>(grad, a, b);
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("silu", ixt::Boxed<ixt::unary<ixt::Silu>>::call);
  m.impl("silu_backward", ixt::Boxed<ixt::unary_backward<ixt::Silu>>::call);
  m.impl("gelu", ixt::Boxed<ixt::gelu>::call);
  m.impl("gelu_backward", ixt::Boxed<ixt::gelu_backward>::call);
  m.impl("relu2", ixt::Boxed<ixt::unary<ixt::Relu2>>::call);
  m.impl("relu2_backward", ixt::Boxed<ixt::unary_backward<ixt::Relu2>>::call);
  m.impl("swiglu", ixt::Boxed<ixt::gated<ixt::Silu>>::call);
  m.impl("swiglu_backward", ixt::Boxed<ixt::gated_backward<ixt::Silu>>::call);
  m.impl("geglu", ixt::Boxed<ixt::geglu>::call);
  m.impl("geglu_backward", ixt::Boxed<ixt::geglu_backward>::call);
}
