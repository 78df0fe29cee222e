// The backwards of RMSNorm and LayerNorm on CUDA.
//
// A block walks a share of the rows. Its threads keep to their columns, so that the sums over the
// rows for weight and bias stay in registers until the block's end; a second kernel adds the sums
// of the blocks in a fixed order. Nothing is added atomically: the same input gives the same bits.
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <tuple>

#include "../common/like_args.h"
#include "column_sums.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kMaxThreads = 512;
// LayerNorm's two sums a column take the registers of half the threads; the others are a second
// block, which works while the first one meets.
template <bool Layer>
constexpr int kThreads = Layer ? 256 : 512;
constexpr int kSumsBytes = 2 * kWarp * sizeof(float);
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

// The rows of grad, x and, if there is one, add, two at a time: while a row is worked on, the next
// is on its way to shared memory. Every thread reads what it has copied itself, so that nothing has
// to meet. Held = 0: read where they are.
template <typename T, int Held, bool Wide>
class Incoming {
 public:
  enum Which { kGrad, kX, kAdd };

  __device__ __forceinline__ explicit Incoming(const BackwardArgs& a) : a_(a) { fetch(blockIdx.x); }

  // Wait for the row that was fetched last, and fetch the one this block takes after it.
  __device__ __forceinline__ void advance(int64_t row) {
    row_ = row;
    fetch(row + gridDim.x);
    if constexpr (Held > 0) __pipeline_wait_prior(1);
  }

  // Pack `i` of this thread, whose first column is `at`.
  __device__ __forceinline__ Pack<T> get(Which which, int i, int64_t at) const {
    if constexpr (Held > 0) return bit_copy<Pack<T>>(*slot(which, i, turn_));
    return load<Wide>(row_of(which, row_), at, a_.cols);
  }

 private:
  __device__ __forceinline__ const T* row_of(Which which, int64_t row) const {
    const void* from = which == kGrad ? a_.grad : which == kX ? a_.x : a_.add;
    const int64_t stride =
        which == kGrad ? a_.grad_stride : which == kX ? a_.stride : a_.add_stride;
    return static_cast<const T*>(from) + row * stride;
  }

  __device__ __forceinline__ uint4* slot(Which which, int i, bool turn) const {
    extern __shared__ uint4 staged[];
    return staged + ((which * 2 + turn) * Held + i) * blockDim.x + threadIdx.x;
  }

  __device__ __forceinline__ void fetch(int64_t row) {
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        const int64_t at = (int64_t{i} * blockDim.x + threadIdx.x) * Pack<T>::N;
        if (row >= a_.rows || at >= a_.cols) continue;
        __pipeline_memcpy_async(slot(kGrad, i, turn_), row_of(kGrad, row) + at, 16);
        __pipeline_memcpy_async(slot(kX, i, turn_), row_of(kX, row) + at, 16);
        if (a_.add) __pipeline_memcpy_async(slot(kAdd, i, turn_), row_of(kAdd, row) + at, 16);
      }
      __pipeline_commit();
      turn_ = !turn_;
    }
  }

  const BackwardArgs& a_;
  int64_t row_ = 0;
  bool turn_ = false;  // where the row at hand is, and the row after the next one goes
};

template <typename T, bool Layer, int Held, bool Wide>
__global__ void __launch_bounds__(kMaxThreads, Held * (1 + Layer) > 2 ? 1 : 2)
    normalize_backward(const __grid_constant__ BackwardArgs a) {
  constexpr int N = Pack<T>::N;
  using In = Incoming<T, Held, Wide>;
  __shared__ float shared[2 * kWarp];
  ColumnSums<N, Held> weights, biases;
  float* weight_line = a.dweight ? a.dweight + blockIdx.x * a.cols : nullptr;
  float* bias_line = a.dbias ? a.dbias + blockIdx.x * a.cols : nullptr;
  const float count = static_cast<float>(a.cols);
  // f(place among the held packs, first column)
  const auto each = [&](const auto& f) {
    const int64_t step = int64_t{blockDim.x} * N;
    int64_t at = int64_t{threadIdx.x} * N;
    if constexpr (Held > 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i, at += step) {
        if (at < a.cols) f(i, at);
      }
    } else {
      for (; at < a.cols; at += step) f(0, at);
    }
  };
  In in(a);
  float next_rstd = a.rstd[blockIdx.x];
  float next_mean = Layer ? a.mean[blockIdx.x] : 0.0f;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const float rstd = next_rstd;
    const float mean = next_mean;
    in.advance(r);
    if (r + gridDim.x < a.rows) {
      next_rstd = a.rstd[r + gridDim.x];
      if (Layer) next_mean = a.mean[r + gridDim.x];
    }
    const auto terms = [&](int i, int64_t at) {
      const Pack<T> grad = in.get(In::kGrad, i, at);
      return Terms<T, Layer, Wide>(a, grad, in.get(In::kX, i, at), mean, rstd, at);
    };
    float sums[2] = {0.0f, 0.0f};  // of scaled * normal, and of scaled
    each([&](int i, int64_t at) {
      const auto t = terms(i, at);
      float product[N], along[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        along[j] = t.scaled[j] * t.normal[j];
        product[j] = t.grad[j] * t.normal[j];
      }
      sums[0] += pairwise_sum(along);
      if (Layer) sums[1] += pairwise_sum(t.scaled);
      if (a.dweight) weights.add(i, weight_line, at, a.cols, r == blockIdx.x, product);
      if (Layer && a.dbias) biases.add(i, bias_line, at, a.cols, r == blockIdx.x, t.grad);
    });
    block_sums(sums, shared);
    const float along = sums[0] / count;
    const float shift = sums[1] / count;
    each([&](int i, int64_t at) {
      const auto t = terms(i, at);
      Pack<T> more, out;
      if (a.add) more = in.get(In::kAdd, i, at);
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

// How a call is spread: packs a thread (0: read where they are), threads a block, blocks.
struct Spread {
  int held;
  int threads;
  int64_t blocks;
};

int staged_bytes(const BackwardArgs& a, const Spread& s) {
  return 2 * 16 * s.held * s.threads * (a.add ? 3 : 2);
}

template <bool Layer>
Spread spread(const BackwardArgs& a, int64_t pack, int device) {
  const int64_t packs = (a.cols + pack - 1) / pack;
  Spread s{1, 0, 0};
  while (s.held < 4 && packs > s.held * kThreads<Layer>) s.held *= 2;
  const int64_t wanted = (packs + s.held - 1) / s.held;
  const int64_t whole = std::max<int64_t>(1, (wanted + kWarp - 1) / kWarp) * kWarp;
  s.threads = static_cast<int>(std::min<int64_t>(whole, kMaxThreads));
  int room = 0;
  check_cuda(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "the size of shared memory");
  const bool fits = packs <= s.held * kMaxThreads && staged_bytes(a, s) + kSumsBytes <= room;
  if (!a.wide || !fits) s.held = 0;
  s.blocks = std::min<int64_t>(a.rows, kBlocks * std::max(1, kThreads<Layer> / s.threads));
  return s;
}

template <typename T, bool Layer>
void run(const BackwardArgs& a, const Spread& s, cudaStream_t stream) {
  auto* kernel = s.held == 4   ? &normalize_backward<T, Layer, 4, true>
                 : s.held == 2 ? &normalize_backward<T, Layer, 2, true>
                 : s.held == 1 ? &normalize_backward<T, Layer, 1, true>
                 : a.wide      ? &normalize_backward<T, Layer, 0, true>
                               : &normalize_backward<T, Layer, 0, false>;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(s.blocks));
  config.blockDim = dim3(s.threads);
  config.dynamicSmemBytes = staged_bytes(a, s);
  config.stream = stream;
  if (config.dynamicSmemBytes > 48 * 1024) {  // more than that is given on request only
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.dynamicSmemBytes)),
               "shared memory of the norms' backward");
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, a), "kernel launch");
}

// Fills dx and the gradients of weight and bias.
template <bool Layer>
void run_backward(BackwardArgs a, Float dtype, const Output& dweight, const Output& dbias,
                  const Vector& weight, const Vector& bias, Place place) {
  const cudaStream_t stream = current_stream(place.index);
  const Spread s = spread<Layer>(a, 16 / element_size(dtype), place.index);
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
