// Branch-free loops over tiles of a matrix. IXT_ISA names the instruction set of this build.
#include "block_loops.h"

#include "../common/mxfp8.h"
#include "transpose.h"
#include "words.h"

namespace ixt {
namespace {

template <typename T>
const typename T::Word* row_of(const Tile& x, int64_t r) {
  return static_cast<const typename T::Word*>(x.data) + r * x.stride;
}

// ---- amax ----

// `Width` columns at a time, so that the maxima stay in registers while the rows go by.
template <typename T, int64_t Width>
IXT_HD void amax_strip(const typename T::Word* x, int64_t stride, int64_t rows, float* amax) {
  Magnitude<T> best[Width] = {};
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    for (int64_t c = 0; c < Width; ++c) {
      const Magnitude<T> mag = magnitude<T>(x[c]);
      best[c] = best[c] > mag ? best[c] : mag;
    }
  }
  for (int64_t c = 0; c < Width; ++c) amax[c] = magnitude_value<T>(best[c]);
}

template <typename T>
void amax_columns(const Tile& x, float* amax) {
  constexpr int64_t wide = 256 / sizeof(typename T::Word);
  const auto* words = row_of<T>(x, 0);
  int64_t c = 0;
  for (; c + wide <= x.cols; c += wide) {
    amax_strip<T, wide>(words + c, x.stride, x.rows, amax + c);
  }
  for (; c + 16 <= x.cols; c += 16) amax_strip<T, 16>(words + c, x.stride, x.rows, amax + c);
  for (; c < x.cols; ++c) amax_strip<T, 1>(words + c, x.stride, x.rows, amax + c);
}

// Calls f(g, first column, count) for each group of a row: `Group` is known to the compiler for
// all but a shorter last one.
template <int64_t Group, typename F>
IXT_HD void each_group(int64_t cols, const F& f) {
  int64_t g = 0;
  for (; (g + 1) * Group <= cols; ++g) f(g, g * Group, Group);
  if (g * Group < cols) f(g, g * Group, cols - g * Group);
}

template <typename T, int64_t Group>
void amax_groups_of(const Tile& x, float* amax, int64_t step) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const auto* words = row_of<T>(x, r);
    each_group<Group>(x.cols, [&](int64_t g, int64_t first, int64_t count) {
      amax[r * step + g] = amax_of<T>(words + first, count);
    });
  }
}

template <typename T>
void amax_groups(const Tile& x, int64_t group, float* amax, int64_t step) {
  if (group == 32) return amax_groups_of<T, 32>(x, amax, step);
  if (group == 64) return amax_groups_of<T, 64>(x, amax, step);
  return amax_groups_of<T, 128>(x, amax, step);
}

// ---- codes ----

// __restrict counts for parameters only, in GCC's eyes: hence a function a row.
template <typename T, typename Format>
IXT_HD void quantize_row(const typename T::Word* __restrict x, uint8_t* __restrict q, int64_t n,
                         const float* __restrict scale) {
  for (int64_t i = 0; i < n; ++i) q[i] = encode_fp8<Format>(T::load(x[i]) * scale[i]);
}

template <typename T, typename Format>
void quantize_columns(const Tile& x, const float* scale, uint8_t* q, int64_t q_stride) {
  for (int64_t r = 0; r < x.rows; ++r) {
    quantize_row<T, Format>(row_of<T>(x, r), q + r * q_stride, x.cols, scale);
  }
}

template <typename T, typename Format>
IXT_HD void quantize_run(const typename T::Word* __restrict x, uint8_t* __restrict q, int64_t n,
                         float scale) {
  for (int64_t i = 0; i < n; ++i) q[i] = encode_fp8<Format>(T::load(x[i]) * scale);
}

template <typename T, typename Format, int64_t Group>
void quantize_groups_of(const Tile& x, const float* scale, int64_t step, uint8_t* q,
                        int64_t q_stride) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const auto* words = row_of<T>(x, r);
    each_group<Group>(x.cols, [&](int64_t g, int64_t first, int64_t count) {
      quantize_run<T, Format>(words + first, q + r * q_stride + first, count, scale[r * step + g]);
    });
  }
}

template <typename T, typename Format>
void quantize_groups(const Tile& x, int64_t group, const float* scale, int64_t step, uint8_t* q,
                     int64_t q_stride) {
  if (group == 32) return quantize_groups_of<T, Format, 32>(x, scale, step, q, q_stride);
  if (group == 64) return quantize_groups_of<T, Format, 64>(x, scale, step, q, q_stride);
  return quantize_groups_of<T, Format, 128>(x, scale, step, q, q_stride);
}

template <typename T, typename Format>
IXT_HD void dequantize_row(const uint8_t* __restrict q, typename T::Word* __restrict y, int64_t n,
                           const float* __restrict scale) {
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(decode_fp8<Format>(q[i]) * scale[i]);
}

template <typename T, typename Format>
void dequantize_columns(const CodesIn& q, const float* scale, void* y, int64_t y_stride) {
  for (int64_t r = 0; r < q.rows; ++r) {
    auto* words = static_cast<typename T::Word*>(y) + r * y_stride;
    dequantize_row<T, Format>(q.data + r * q.stride, words, q.cols, scale);
  }
}

template <typename T, typename Format>
IXT_HD void dequantize_run(const uint8_t* __restrict q, typename T::Word* __restrict y, int64_t n,
                           float scale) {
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(decode_fp8<Format>(q[i]) * scale);
}

template <typename T, typename Format, int64_t Group>
void dequantize_groups_of(const CodesIn& q, const float* scale, int64_t step, void* y,
                          int64_t y_stride) {
  for (int64_t r = 0; r < q.rows; ++r) {
    const uint8_t* codes = q.data + r * q.stride;
    auto* words = static_cast<typename T::Word*>(y) + r * y_stride;
    each_group<Group>(q.cols, [&](int64_t g, int64_t first, int64_t count) {
      dequantize_run<T, Format>(codes + first, words + first, count, scale[r * step + g]);
    });
  }
}

template <typename T, typename Format>
void dequantize_groups(const CodesIn& q, int64_t group, const float* scale, int64_t step, void* y,
                       int64_t y_stride) {
  if (group == 32) return dequantize_groups_of<T, Format, 32>(q, scale, step, y, y_stride);
  if (group == 64) return dequantize_groups_of<T, Format, 64>(q, scale, step, y, y_stride);
  return dequantize_groups_of<T, Format, 128>(q, scale, step, y, y_stride);
}

// ---- scales ----

template <typename Format>
void fp8_scales(const float* __restrict amax, int64_t n, const ScaleRule& rule,
                float* __restrict scale, float* __restrict scale_inv) {
  const ScaleRule local = rule;  // or the compiler fears that the stores change it
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = scale_from_amax<Format>(amax[i], local);
    scale_inv[i] = 1.0f / scale[i];
  }
}

template <typename Format>
void mx_scales(const float* __restrict amax, int64_t n, bool ceil, float* __restrict scale,
               uint8_t* __restrict stored) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t e = ceil ? e8m0_ceil<Format>(amax[i]) : e8m0_floor<Format>(amax[i]);
    scale[i] = e8m0_inverse(e);
    stored[i] = static_cast<uint8_t>(e);
  }
}

template <typename T>
constexpr BlockLoops loops() {
  return {&amax_columns<T>,
          &amax_groups<T>,
          {&quantize_columns<T, E4M3>, &quantize_columns<T, E5M2>},
          {&quantize_groups<T, E4M3>, &quantize_groups<T, E5M2>},
          {&dequantize_columns<T, E4M3>, &dequantize_columns<T, E5M2>},
          {&dequantize_groups<T, E4M3>, &dequantize_groups<T, E5M2>}};
}

constexpr BlockLoopTable table = {loops<F32>(),
                                  loops<F16>(),
                                  loops<BF16>(),
                                  {&fp8_scales<E4M3>, &fp8_scales<E5M2>},
                                  {&mx_scales<E4M3>, &mx_scales<E5M2>},
                                  &transpose_bytes};

}  // namespace

const BlockLoopTable* IXT_CONCAT(block_loops_, IXT_ISA)() { return &table; }

}  // namespace ixt
