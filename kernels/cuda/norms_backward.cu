// The backwards of RMSNorm and LayerNorm on CUDA.
//
// A block walks a share of the rows. Its threads keep to their columns, so that the sums over the
// rows for weight and bias stay in registers until the block's end; a second kernel adds the sums
// of the blocks in a fixed order. Nothing is added atomically: the same input gives the same bits.
#include <algorithm>
#include <tuple>

#include "../common/like_args.h"
#include "floats.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kBlocks = 264;  // two for each of Hopper's processors; more where blocks are small

struct BackwardArgs {
  const void *grad, *x, *add;
  int64_t rows, cols, grad_stride, stride, add_stride;
  const void* weight;
  Float weight_dtype;
  const float *mean, *rstd;
  float offset;
  void* dx;
  float *dweight, *dbias;  // (blocks, cols) sums, or nullptr where not wanted
  bool wide;
};

// The sums of one thread's columns, in registers (Held packs) or, Held = 0, in the block's line.
template <int N, int Held>
class ColumnSums {
 public:
  // `first`: nothing is in the line yet.
  __device__ __forceinline__ void add(int i, float* line, int64_t at, int64_t cols, bool first,
                                      const float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Held > 0) {
        held_[i][j] += v[j];
      } else if (at + j < cols) {
        line[at + j] = first ? v[j] : line[at + j] + v[j];
      }
    }
  }

  __device__ __forceinline__ void finish(float* line, int64_t cols) const {
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        const int64_t at = (int64_t{i} * blockDim.x + threadIdx.x) * N;
#pragma unroll
        for (int j = 0; j < N; j += 4) {
          if (at >= cols) continue;
          *reinterpret_cast<float4*>(line + at + j) =
              make_float4(held_[i][j], held_[i][j + 1], held_[i][j + 2], held_[i][j + 3]);
        }
      }
    }
  }

 private:
  float held_[Held > 0 ? Held : 1][N] = {};
};

template <typename T, bool Layer, bool Wide>
struct Terms {
  static constexpr int N = Pack<T>::N;
  float grad[N];    // of y
  float normal[N];  // the normalized row
  float scaled[N];  // grad times weight

  __device__ __forceinline__ Terms(const BackwardArgs& a, const Pack<T>& g, const Pack<T>& x,
                                   float mean, float rstd, int64_t at) {
    float gain[N];
    if (a.weight) load_any<Wide>(a.weight, a.weight_dtype, at, a.cols, gain);
    const int count = inside<Wide, T>(at, a.cols);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = to_float(x.at[i]);
      grad[i] = to_float(g.at[i]);
      normal[i] = i < count ? (Layer ? v - mean : v) * rstd : 0.0f;
      scaled[i] = grad[i];
      if (a.weight) scaled[i] *= Layer ? gain[i] : gain[i] + a.offset;
    }
  }
};

template <typename T, bool Layer, int Held, bool Wide>
__global__ void __launch_bounds__(kMaxThreads, Held * (1 + Layer) > 2 ? 1 : 2)
    normalize_backward(const __grid_constant__ BackwardArgs a) {
  constexpr int N = Pack<T>::N;
  __shared__ float shared[2 * kWarp];
  ColumnSums<N, Held> weights, biases;
  float* weight_line = a.dweight ? a.dweight + blockIdx.x * a.cols : nullptr;
  float* bias_line = a.dbias ? a.dbias + blockIdx.x * a.cols : nullptr;
  const float count = static_cast<float>(a.cols);
  const int64_t step = int64_t{blockDim.x} * N;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const T* grad = static_cast<const T*>(a.grad) + r * a.grad_stride;
    const T* x = static_cast<const T*>(a.x) + r * a.stride;
    Pack<T> g[Held > 0 ? Held : 1], v[Held > 0 ? Held : 1];
    const float rstd = a.rstd[r];
    const float mean = Layer ? a.mean[r] : 0.0f;
    const auto read = [&](int i, int64_t at) {
      g[i] = load<Wide>(grad, at, a.cols);
      v[i] = load<Wide>(x, at, a.cols);
    };
    // f(place among the held packs, first column)
    const auto each = [&](const auto& f) {
      int64_t at = int64_t{threadIdx.x} * N;
      if constexpr (Held > 0) {
#pragma unroll
        for (int i = 0; i < Held; ++i, at += step) {
          if (at < a.cols) f(i, at);
        }
      } else {
        for (; at < a.cols; at += step) {
          read(0, at);
          f(0, at);
        }
      }
    };
    if constexpr (Held > 0) each(read);
    float sums[2] = {0.0f, 0.0f};  // of scaled * normal, and of scaled
    each([&](int i, int64_t at) {
      const Terms<T, Layer, Wide> t(a, g[i], v[i], mean, rstd, at);
      float product[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[0] += t.scaled[j] * t.normal[j];
        if (Layer) sums[1] += t.scaled[j];
        product[j] = t.grad[j] * t.normal[j];
      }
      if (a.dweight) weights.add(i, weight_line, at, a.cols, r == blockIdx.x, product);
      if (Layer && a.dbias) biases.add(i, bias_line, at, a.cols, r == blockIdx.x, t.grad);
    });
    block_sums(sums, shared);
    const float along = sums[0] / count;
    const float shift = sums[1] / count;
    each([&](int i, int64_t at) {
      const Terms<T, Layer, Wide> t(a, g[i], v[i], mean, rstd, at);
      Pack<T> more, out;
      if (a.add) {
        more = load<Wide>(static_cast<const T*>(a.add) + r * a.add_stride, at, a.cols);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float d = Layer ? t.scaled[j] - shift : t.scaled[j];
        d = (d - t.normal[j] * along) * rstd;
        if (a.add) d += to_float(more.at[j]);
        out.at[j] = rounded<T>(d);
      }
      store<Wide>(static_cast<T*>(a.dx) + r * a.cols, at, a.cols, out);
    });
  }
  if (a.dweight) weights.finish(weight_line, a.cols);
  if (Layer && a.dbias) biases.finish(bias_line, a.cols);
}

constexpr int kSumColumns = 32;
constexpr int kSumRows = 16;

// Sums of the columns of (lines, cols): 16 threads a column, then their sums in order.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_columns(const float* __restrict__ from, int64_t lines, int64_t cols, void* to,
                Float dtype) {
  __shared__ float shared[kSumRows][kSumColumns];
  const int column = threadIdx.x % kSumColumns;
  const int group = threadIdx.x / kSumColumns;
  const int64_t at = blockIdx.x * int64_t{kSumColumns} + column;
  float sum = 0.0f;
  if (at < cols) {
#pragma unroll 4
    for (int64_t line = group; line < lines; line += kSumRows) sum += from[line * cols + at];
  }
  shared[group][column] = sum;
  __syncthreads();
  if (group != 0 || at >= cols) return;
  for (int i = 1; i < kSumRows; ++i) sum += shared[i][column];
  if (dtype == Float::bf16) {
    static_cast<bf16*>(to)[at] = rounded<bf16>(sum);
  } else if (dtype == Float::f16) {
    static_cast<f16*>(to)[at] = rounded<f16>(sum);
  } else {
    static_cast<float*>(to)[at] = sum;
  }
}

// How a call is spread: packs a thread (0: not in registers), threads a block, blocks.
struct Spread {
  int held;
  int threads;
  int64_t blocks;
};

Spread spread(const BackwardArgs& a, int64_t pack) {
  const int64_t packs = (a.cols + pack - 1) / pack;
  int held = 1;
  while (held < 4 && packs > held * kMaxThreads) held *= 2;
  if (!a.wide || packs > held * kMaxThreads) held = 0;
  const int64_t wanted = held ? (packs + held - 1) / held : packs;
  const int64_t whole = std::max<int64_t>(1, (wanted + kWarp - 1) / kWarp) * kWarp;
  const int threads = static_cast<int>(std::min<int64_t>(whole, kMaxThreads));
  return {held, threads, std::min<int64_t>(a.rows, kBlocks * (kMaxThreads / threads))};
}

template <typename T, bool Layer>
void run(const BackwardArgs& a, const Spread& s, cudaStream_t stream) {
  auto* kernel = s.held == 4   ? &normalize_backward<T, Layer, 4, true>
                 : s.held == 2 ? &normalize_backward<T, Layer, 2, true>
                 : s.held == 1 ? &normalize_backward<T, Layer, 1, true>
                 : a.wide      ? &normalize_backward<T, Layer, 0, true>
                               : &normalize_backward<T, Layer, 0, false>;
  launch(kernel, s.blocks, s.threads, stream, false, a);
}

// Fills dx and the gradients of weight and bias.
template <bool Layer>
void run_backward(BackwardArgs a, Float dtype, const Output& dweight, const Output& dbias,
                  const Vector& weight, const Vector& bias, Place place) {
  const cudaStream_t stream = current_stream(place.index);
  const Spread s = spread(a, 16 / element_size(dtype));
  // Freed on return, which the allocator orders after the kernels of this stream.
  const int64_t lines[2] = {s.blocks, a.cols};
  const int64_t none[2] = {0, 0};
  const Output weight_lines = empty(weight.tensor ? lines : none, 2, dtype_codes().f32, place);
  const Output bias_lines = empty(bias.tensor ? lines : none, 2, dtype_codes().f32, place);
  if (weight.tensor) a.dweight = weight_lines.data<float>();
  if (bias.tensor) a.dbias = bias_lines.data<float>();
  if (a.rows > 0 && a.cols > 0) {
    with_type<bf16, f16>(dtype, [&](auto t) { run<decltype(t), Layer>(a, s, stream); });
  }
  const int64_t grid = (a.cols + kSumColumns - 1) / kSumColumns;
  const auto sum = [&](const Vector& vector, const float* from, const Output& to) {
    if (!vector.tensor || a.cols == 0) return;
    launch(sum_columns, grid, kSumColumns * kSumRows, stream, false, from, s.blocks, a.cols,
           to.data(), vector.dtype);
  };
  sum(weight, a.dweight, dweight);
  sum(bias, a.dbias, dbias);
}

bool add_matrix(const Rows& m, const void** data, int64_t* stride, Float dtype) {
  *data = m.tensor.const_data_ptr();
  *stride = m.stride;
  return is_wide(*data, m.rows, m.stride, element_size(dtype));
}

BackwardArgs backward_args(const Rows& grad, const Rows& x, const Vector& weight,
                           const Tensor& rstd, Float dtype) {
  BackwardArgs a{};
  a.rows = x.rows;
  a.cols = x.cols;
  a.weight = weight.data;
  a.weight_dtype = weight.dtype;
  a.rstd = static_cast<const float*>(rstd.const_data_ptr());
  const bool aligned = add_matrix(grad, &a.grad, &a.grad_stride, dtype) &
                       add_matrix(x, &a.x, &a.stride, dtype);
  a.wide = aligned && x.cols * element_size(dtype) % 16 == 0 && aligned16(weight.data);
  return a;
}

std::tuple<Output, Output> rms_norm_backward(const Tensor& grad, const Tensor& x,
                                             const std::optional<Tensor>& weight_any,
                                             const Tensor& rstd_any, double offset,
                                             const std::optional<Tensor>& add) {
  const Float dtype = float_dtype(x, "x");
  check_rank(x);
  check_like(grad, "grad", x, "x");
  const Vector weight = vector_arg(weight_any, "weight", x);
  const Tensor rstd = statistic_arg(rstd_any, "rstd", x);
  if (add) check_like(*add, "add", x, "x");
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const Rows grads = as_rows(grad);
  const Rows rows = as_rows(x);
  const Rows more = add ? as_rows(*add) : rows;
  Output dx = empty_like(x, code_of(dtype), place);
  Output dweight = empty_gradient(weight, rows.cols, place);
  BackwardArgs a = backward_args(grads, rows, weight, rstd, dtype);
  if (add) a.wide &= add_matrix(more, &a.add, &a.add_stride, dtype);
  a.offset = static_cast<float>(offset);
  a.dx = dx.data();
  run_backward<false>(a, dtype, dweight, dweight, weight, {}, place);
  return {std::move(dx), std::move(dweight)};
}

std::tuple<Output, Output, Output> layer_norm_backward(const Tensor& grad, const Tensor& x,
                                                       const std::optional<Tensor>& weight_any,
                                                       const std::optional<Tensor>& bias_any,
                                                       const Tensor& mean_any,
                                                       const Tensor& rstd_any) {
  const Float dtype = float_dtype(x, "x");
  check_rank(x);
  check_like(grad, "grad", x, "x");
  const Vector weight = vector_arg(weight_any, "weight", x);
  const Vector bias = vector_arg(bias_any, "bias", x);
  const Tensor mean = statistic_arg(mean_any, "mean", x);
  const Tensor rstd = statistic_arg(rstd_any, "rstd", x);
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const Rows grads = as_rows(grad);
  const Rows rows = as_rows(x);
  Output dx = empty_like(x, code_of(dtype), place);
  Output dweight = empty_gradient(weight, rows.cols, place);
  Output dbias = empty_gradient(bias, rows.cols, place);
  BackwardArgs a = backward_args(grads, rows, weight, rstd, dtype);
  a.mean = static_cast<const float*>(mean.const_data_ptr());
  a.dx = dx.data();
  run_backward<true>(a, dtype, dweight, dbias, weight, bias, place);
  return {std::move(dx), std::move(dweight), std::move(dbias)};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("rms_norm_backward", ixt::Boxed<ixt::rms_norm_backward>::call);
  m.impl("layer_norm_backward", ixt::Boxed<ixt::layer_norm_backward>::call);
}
