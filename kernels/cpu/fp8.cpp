// FP8 quantize and dequantize on the CPU: threads, shapes and registration.
//
// The arithmetic is in fp8_loops.cpp and common/fp8.h. All results are exact and do not depend on
// the number of threads, since max is associative.
#include <algorithm>
#include <tuple>

#include "../common/op_args.h"
#include "fp8_loops.h"
#include "isa.h"

namespace ixt {
namespace {

constexpr int64_t kBlock = 4096;       // elements between two looks at the same data: stays in L1
constexpr int64_t kGrain = 32 * 1024;  // elements that are worth a thread

const Fp8LoopTable& loop_table() {
  static const Fp8LoopTable* best = IXT_BEST_OF(fp8_loops);
  return *best;
}

const Fp8Loops& loops_for(Float dtype) { return loops_of(loop_table(), dtype); }

struct Source {
  const char* data;
  int64_t item;
  const void* at(int64_t i) const { return data + i * item; }
};

int64_t block_count(int64_t n) { return (n + kBlock - 1) / kBlock; }

// Run f(first, last) over the blocks of n elements.
template <typename F>
void for_blocks(int64_t n, const F& f) {
  torch::stable::parallel_for(0, block_count(n), kGrain / kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) f(b, b * kBlock, std::min(n, (b + 1) * kBlock));
  });
}

template <typename F>
void for_rows(const Rows& x, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.cols));
  torch::stable::parallel_for(0, x.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) f(r);
  });
}

float whole_amax(const Source& x, int64_t n, const Fp8Loops& loops) {
  std::vector<float> partial(block_count(n), 0.0f);
  for_blocks(n, [&](int64_t b, int64_t first, int64_t last) {
    partial[b] = loops.amax(x.at(first), last - first);
  });
  float amax = 0.0f;
  for (const float value : partial) amax = std::max(amax, value);
  return amax;
}

float scale_for(Fp8 format, float amax, const ScaleRule& rule) {
  return format == Fp8::e4m3 ? scale_from_amax<E4M3>(amax, rule)
                             : scale_from_amax<E5M2>(amax, rule);
}

const float* const_floats(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }

using Static = std::tuple<Output, Output, Output>;
using Current = std::tuple<Output, Output>;

Static static_whole(const Tensor& x_any, const Tensor& scale, Float in, Fp8 out, Place place) {
  const Tensor x = as_contiguous(x_any);
  Output q = empty_like(x, code_of(out), place);
  Output scale_inv = empty_like(scale, dtype_codes().f32, place);
  Output amax = empty_like(scale, dtype_codes().f32, place);
  const Fp8Loops& loops = loops_for(in);
  const auto quantize = loops.quantize[static_cast<int>(out)];
  const Source src{static_cast<const char*>(x.const_data_ptr()), item_size(in)};
  const float s = *const_floats(scale);
  const int64_t n = x.numel();
  uint8_t* dst = q.data<uint8_t>();
  std::vector<float> partial(block_count(n), 0.0f);
  for_blocks(n, [&](int64_t b, int64_t first, int64_t last) {
    partial[b] = loops.amax(src.at(first), last - first);
    quantize(src.at(first), dst + first, last - first, s);
  });
  float best = 0.0f;
  for (const float value : partial) best = std::max(best, value);
  *amax.data<float>() = best;
  *scale_inv.data<float>() = 1.0f / s;
  return {std::move(q), std::move(scale_inv), std::move(amax)};
}

Static static_rows(const Tensor& x_any, const Tensor& scale_any, Float in, Fp8 out, Place place) {
  const Rows x = as_rows(x_any);
  const Tensor scale = as_contiguous(scale_any);
  Output q = empty_like(x_any, code_of(out), place);
  Output scale_inv = empty_per_row(x_any, place);
  Output amax = empty_per_row(x_any, place);
  const Fp8Loops& loops = loops_for(in);
  const auto quantize = loops.quantize[static_cast<int>(out)];
  const Source src{static_cast<const char*>(x.tensor.const_data_ptr()), item_size(in)};
  const float* s = const_floats(scale);
  uint8_t* dst = q.data<uint8_t>();
  float* inv = scale_inv.data<float>();
  float* best = amax.data<float>();
  for_rows(x, [&](int64_t r) {
    best[r] = loops.amax(src.at(r * x.stride), x.cols);
    quantize(src.at(r * x.stride), dst + r * x.cols, x.cols, s[r]);
    inv[r] = 1.0f / s[r];
  });
  return {std::move(q), std::move(scale_inv), std::move(amax)};
}

Static quantize_fp8_static(const Tensor& x, const Tensor& scale, ScalarType dtype) {
  const Float in = float_dtype(x, "x");
  const Fp8 out = fp8_dtype(dtype);
  const Place place = place_of(x);
  return scale_grain(scale, "scale", x, place) == Grain::tensor
             ? static_whole(x, scale, in, out, place)
             : static_rows(x, scale, in, out, place);
}

Current quantize_fp8_tensor(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  const ScaleRule rule = scale_rule(eps, pow2, kFloatMax);
  const Place place = place_of(x_any);
  const Tensor x = as_contiguous(x_any);
  Output q = empty_like(x, code_of(out), place);
  Output scale_inv = empty(nullptr, 0, dtype_codes().f32, place);
  const Fp8Loops& loops = loops_for(in);
  const auto quantize = loops.quantize[static_cast<int>(out)];
  const Source src{static_cast<const char*>(x.const_data_ptr()), item_size(in)};
  const int64_t n = x.numel();
  uint8_t* dst = q.data<uint8_t>();
  const float scale = scale_for(out, whole_amax(src, n, loops), rule);
  for_blocks(n, [&](int64_t, int64_t first, int64_t last) {
    quantize(src.at(first), dst + first, last - first, scale);
  });
  *scale_inv.data<float>() = 1.0f / scale;
  return {std::move(q), std::move(scale_inv)};
}

Current quantize_fp8_row(const Tensor& x_any, ScalarType dtype, double eps, bool pow2) {
  const Float in = float_dtype(x_any, "x");
  const Fp8 out = fp8_dtype(dtype);
  IXT_CHECK(x_any.dim() >= 1, "`x` must have at least 1 dimension, got 0");
  const ScaleRule rule = scale_rule(eps, pow2, max_finite(in));
  const Place place = place_of(x_any);
  const Rows x = as_rows(x_any);
  Output q = empty_like(x_any, code_of(out), place);
  Output scale_inv = empty_per_row(x_any, place);
  const Fp8Loops& loops = loops_for(in);
  const auto quantize = loops.quantize[static_cast<int>(out)];
  const Source src{static_cast<const char*>(x.tensor.const_data_ptr()), item_size(in)};
  uint8_t* dst = q.data<uint8_t>();
  float* inv = scale_inv.data<float>();
  for_rows(x, [&](int64_t r) {
    const float amax = loops.amax(src.at(r * x.stride), x.cols);
    const float scale = scale_for(out, amax, rule);
    quantize(src.at(r * x.stride), dst + r * x.cols, x.cols, scale);
    inv[r] = 1.0f / scale;
  });
  return {std::move(q), std::move(scale_inv)};
}

Output dequantize_fp8(const Tensor& q_any, const Tensor& scale_any, ScalarType dtype) {
  const Fp8 in = fp8_dtype(q_any, "codes");
  const Float out = float_dtype(dtype);
  const Place place = place_of(q_any);
  const Grain grain = scale_grain(scale_any, "scale_inv", q_any, place);
  const Tensor scale = as_contiguous(scale_any);
  const float* s = const_floats(scale);
  Output y = empty_like(q_any, code_of(out), place);
  const auto dequantize = loops_for(out).dequantize[static_cast<int>(in)];
  const int64_t item = item_size(out);
  char* dst = y.data<char>();
  if (grain == Grain::tensor) {
    const Tensor q = as_contiguous(q_any);
    const auto* src = static_cast<const uint8_t*>(q.const_data_ptr());
    for_blocks(q.numel(), [&](int64_t, int64_t first, int64_t last) {
      dequantize(src + first, dst + first * item, last - first, *s);
    });
  } else {
    const Rows q = as_rows(q_any);
    const auto* src = static_cast<const uint8_t*>(q.tensor.const_data_ptr());
    for_rows(q, [&](int64_t r) {
      dequantize(src + r * q.stride, dst + r * q.cols * item, q.cols, s[r]);
    });
  }
  return y;
}

}  // namespace
}  // namespace ixt

// The instruction set that the loops run on: "baseline", "v3" or "v4".
extern "C" __attribute__((visibility("default"))) const char* inductor_ext_cpu_isa() {
  return ixt::loop_table().isa;
}

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("quantize_fp8_static", ixt::Boxed<ixt::quantize_fp8_static>::call);
  m.impl("quantize_fp8_tensor", ixt::Boxed<ixt::quantize_fp8_tensor>::call);
  m.impl("quantize_fp8_row", ixt::Boxed<ixt::quantize_fp8_row>::call);
  m.impl("dequantize_fp8", ixt::Boxed<ixt::dequantize_fp8>::call);
}
