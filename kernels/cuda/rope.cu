// Rotary position embedding and its backward on CUDA: one read, one write, in packs of 16 bytes.
//
// x is (B, H, S, D) with any strides but the last. A unit is 2 N elements of a head, N of them the
// partners of the other N: elements [i, i + N) and [R/2 + i, R/2 + i + N) of the R that are rotated,
// or [2 i, 2 i + 2 N) where neighbours are pairs; both take entries [i, i + N) of a table of half
// width. Behind them, 2 N elements that pass through. A thread does its unit for kHeads heads,
// which share cosines and sines.
#include <optional>

#include "../common/int_args.h"
#include "../common/like_args.h"
#include "floats.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // of a thread

struct RopeArgs {
  const void* x;
  int64_t x_b, x_h, x_s;
  void* y;
  int64_t y_b, y_h, y_s;
  const void* cos;
  const void* sin;
  Float table;
  int64_t t_b, t_s;  // between rows of the tables; t_b is 0 where sequences share them
  bool full;         // the tables have an entry for each of a pair
  const void* positions;
  bool wide_positions;  // int64
  int64_t p_b, p_s;
  int64_t rows;  // of the tables, where there are positions
  int batch, heads, tokens, size, rotary;
  int units, rotary_units, head_groups;
  bool narrow;      // threads are counted in 32 bits
  bool transposed;  // the backward
};

// index % base, and the index without it. 32-bit division is several times cheaper.
__device__ __forceinline__ int next_digit(int64_t& index, int base, bool narrow) {
  const int64_t all = index;
  index = narrow ? static_cast<uint32_t>(all) / static_cast<uint32_t>(base) : all / base;
  return static_cast<int>(all - index * base);
}

__device__ __forceinline__ int64_t table_row(const RopeArgs& a, int b, int s) {
  if (a.positions == nullptr) return b * a.t_b + s * a.t_s;
  const int64_t at = b * a.p_b + s * a.p_s;
  int64_t row = a.wide_positions ? static_cast<const int64_t*>(a.positions)[at]
                                 : static_cast<const int32_t*>(a.positions)[at];
  row = row < 0 ? 0 : row < a.rows ? row : a.rows - 1;
  return row * a.t_s;
}

// Entries of the first and the second of N pairs, from pair `i` on.
template <bool Wide, bool Interleaved, int N>
__device__ __forceinline__ void factors(const RopeArgs& a, const void* table, int64_t row, int i,
                                        float (&first)[N], float (&second)[N]) {
  constexpr int64_t kAll = int64_t{1} << 62;  // nothing is cut short
  if (!a.full) {
    load_any<Wide, N>(table, a.table, row + i, kAll, first);
#pragma unroll
    for (int j = 0; j < N; ++j) second[j] = first[j];
  } else if constexpr (Interleaved) {
    float both[2 * N];
    load_any<Wide, 2 * N>(table, a.table, row + 2 * i, kAll, both);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first[j] = both[2 * j];
      second[j] = both[2 * j + 1];
    }
  } else {
    load_any<Wide, N>(table, a.table, row + i, kAll, first);
    load_any<Wide, N>(table, a.table, row + a.rotary / 2 + i, kAll, second);
  }
}

// N elements, in one access if they are a pack.
template <typename T, int N>
struct Part {
  T at[N];
  __device__ __forceinline__ void load(const T* from) {
    *this = bit_copy<Part>(*reinterpret_cast<const Raw<N * sizeof(T)>*>(from));
  }
  __device__ __forceinline__ void store(T* to) const {
    *reinterpret_cast<Raw<N * sizeof(T)>*>(to) = bit_copy<Raw<N * sizeof(T)>>(*this);
  }
};

// (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b), each product and sum rounded on its own.
template <typename T, bool Interleaved, int N>
__device__ __forceinline__ void rotate(Part<T, N>& low, Part<T, N>& high, const float (&cos_a)[N],
                                       const float (&cos_b)[N], const float (&sin_a)[N],
                                       const float (&sin_b)[N]) {
  const Part<T, N> old_low = low;
  const Part<T, N> old_high = high;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int p = 2 * j;  // its place among 2 N neighbours
    const T a_in = Interleaved ? (p < N ? old_low.at[p % N] : old_high.at[p % N]) : old_low.at[j];
    const T b_in = Interleaved ? (p + 1 < N ? old_low.at[(p + 1) % N] : old_high.at[(p + 1) % N])
                               : old_high.at[j];
    const float a = to_float(a_in);
    const float b = to_float(b_in);
    const T a_out = rounded<T>(__fsub_rn(__fmul_rn(a, cos_a[j]), __fmul_rn(b, sin_a[j])));
    const T b_out = rounded<T>(__fadd_rn(__fmul_rn(b, cos_b[j]), __fmul_rn(a, sin_b[j])));
    if constexpr (Interleaved) {
      (p < N ? low : high).at[p % N] = a_out;
      (p + 1 < N ? low : high).at[(p + 1) % N] = b_out;
    } else {
      low.at[j] = a_out;
      high.at[j] = b_out;
    }
  }
}

template <typename T, bool Interleaved, int N>
__global__ void __launch_bounds__(kThreads) rope(const __grid_constant__ RopeArgs a) {
  constexpr bool kWide = N > 1;
  int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int unit = next_digit(index, a.units, a.narrow);
  const int h = next_digit(index, a.head_groups, a.narrow) * kHeads;
  const int s = next_digit(index, a.tokens, a.narrow);
  if (index >= a.batch) return;
  const int b = static_cast<int>(index);

  const bool rotates = unit < a.rotary_units;
  const int i = unit * N;
  const int behind = a.rotary + (unit - a.rotary_units) * 2 * N;
  const int low_at = rotates ? (Interleaved ? 2 * i : i) : behind;
  const int high_at = !rotates || Interleaved ? low_at + N : a.rotary / 2 + i;
  const bool has_high = high_at < a.size;  // an odd element is left where N is 1
  const int count = a.heads - h < kHeads ? a.heads - h : kHeads;

  const T* x = static_cast<const T*>(a.x) + b * a.x_b + h * a.x_h + s * a.x_s;
  Part<T, N> low[kHeads], high[kHeads];
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (k >= count) continue;
    low[k].load(x + k * a.x_h + low_at);
    if (has_high) high[k].load(x + k * a.x_h + high_at);
  }
  if (rotates) {
    const int64_t row = table_row(a, b, s);
    float cos_a[N], cos_b[N], sin_a[N], sin_b[N];
    factors<kWide, Interleaved, N>(a, a.cos, row, i, cos_a, cos_b);
    factors<kWide, Interleaved, N>(a, a.sin, row, i, sin_a, sin_b);
    if (a.transposed) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float other = -sin_a[j];
        sin_a[j] = -sin_b[j];
        sin_b[j] = other;
      }
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      rotate<T, Interleaved, N>(low[k], high[k], cos_a, cos_b, sin_a, sin_b);
    }
  }
  T* y = static_cast<T*>(a.y) + b * a.y_b + h * a.y_h + s * a.y_s;
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (k >= count) continue;
    low[k].store(y + k * a.y_h + low_at);
    if (has_high) high[k].store(y + k * a.y_h + high_at);
  }
}

// ---- host

int small(int64_t n, const char* what) {
  IXT_CHECK(n <= 0x7FFFFFFF, what, " must be below 2^31, got ", n);
  return static_cast<int>(n);
}

// `t` with unit stride in its last dimension.
Tensor with_rows(const Tensor& t) {
  const auto sizes = t.sizes();
  return sizes.back() <= 1 || t.strides().back() == 1 ? t : torch::stable::contiguous(t);
}

// (B, H, S, D) that lies as (B, S, H, D).
Output empty_token_major(const int64_t (&n)[4], int32_t dtype, Place place) {
  const auto one = [](int64_t size) { return size > 1 ? size : 1; };
  const int64_t strides[4] = {one(n[2]) * one(n[1]) * one(n[3]), one(n[3]), one(n[1]) * one(n[3]),
                              1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(4, n, strides, dtype, place.type, place.index, &handle));
  return Output(handle);
}

void set_tables(RopeArgs& a, const Tensor& cos, const Tensor& sin,
                const std::optional<Tensor>& positions, const Tensor& x, const char* name) {
  check_place(cos, "cos", x, name);
  check_like(sin, "sin", cos, "cos");
  a.table = float_dtype(cos, "cos");
  a.cos = cos.const_data_ptr();
  a.sin = sin.const_data_ptr();
  const int64_t rank = cos.dim();
  const auto sizes = cos.sizes();
  const int64_t width = sizes.back();
  IXT_CHECK(rank == 2 || rank == 3, "`cos` must have 2 or 3 dimensions, got ", rank);
  IXT_CHECK(width == a.rotary || width == a.rotary / 2, "`cos` must have a last size of ", a.rotary,
            " or ", a.rotary / 2, ", got ", width);
  a.full = width == a.rotary;
  a.t_s = width;  // contiguous
  if (positions) {
    IXT_CHECK(rank == 2 && sizes[0] > 0, "`cos` must be a table where `positions` are given");
    check_place(*positions, "positions", x, name);
    const int32_t dtype = dtype_code(*positions);
    a.wide_positions = dtype == aoti_torch_dtype_int64();
    IXT_CHECK(a.wide_positions || dtype == aoti_torch_dtype_int32(),
              "`positions` must be int32 or int64, got ", dtype_name(dtype));
    const auto p = positions->sizes();
    IXT_CHECK((p.size() == 1 && p[0] == a.tokens) ||
                  (p.size() == 2 && p[0] == a.batch && p[1] == a.tokens),
              "`positions` must have the shape (S,) or (B, S), got ", shape_text(*positions));
    a.positions = positions->const_data_ptr();
    a.p_b = p.size() == 2 ? positions->strides()[0] : 0;
    a.p_s = positions->strides()[p.size() - 1];
    a.rows = sizes[0];
    return;
  }
  IXT_CHECK(sizes[rank - 2] == a.tokens &&
                (rank == 2 || sizes[0] == 1 || sizes[0] == a.batch),
            "`cos` must have a row a token of `", name, "`, got ", shape_text(cos));
  a.t_b = rank == 3 && sizes[0] > 1 ? a.tokens * width : 0;
}

bool is_aligned(const RopeArgs& a, int64_t element, int64_t table_element) {
  const int64_t n = 16 / element;
  bool wide = aligned16(a.x) && a.rotary / 2 % n == 0 && (a.size - a.rotary) % (2 * n) == 0;
  for (const int64_t stride : {a.x_b, a.x_h, a.x_s}) wide = wide && stride % n == 0;
  // Rows of the tables are read in 16 bytes too, or in 8 where N elements are no more.
  return wide && aligned16(a.cos) && aligned16(a.sin) && a.t_s * table_element % 16 == 0;
}

template <typename T, bool Interleaved>
void run(RopeArgs& a, Place place) {
  const int64_t table_element = element_size(a.table);
  const bool wide = is_aligned(a, sizeof(T), table_element);
  const int n = wide ? kVector<T> : 1;
  a.rotary_units = a.rotary / (2 * n);
  a.units = a.rotary_units + (a.size - a.rotary + 2 * n - 1) / (2 * n);
  a.head_groups = (a.heads + kHeads - 1) / kHeads;
  const int64_t threads = int64_t{a.units} * a.head_groups * a.tokens * a.batch;
  if (threads == 0) return;
  a.narrow = threads + kThreads <= 0xFFFFFFFFll;
  auto* kernel = wide ? rope<T, Interleaved, kVector<T>> : rope<T, Interleaved, 1>;
  launch(kernel, (threads + kThreads - 1) / kThreads, kThreads, current_stream(place.index), false,
         a);
}

Output rotated(const Tensor& x_any, const char* name, const Tensor& cos, const Tensor& sin,
               const std::optional<Tensor>& positions, int64_t rotary_dim, bool interleaved,
               bool transposed, bool token_major) {
  const Float dtype = float_dtype(x_any, name);
  const Place place = place_of(x_any);
  const DeviceScope scope(place.index);
  IXT_CHECK(x_any.dim() == 4, "`", name, "` must have the shape (B, H, S, D), got ",
            shape_text(x_any));
  const Tensor x = with_rows(x_any);
  const auto sizes = x.sizes();
  RopeArgs a{};
  a.batch = small(sizes[0], "B");
  a.heads = small(sizes[1], "H");
  a.tokens = small(sizes[2], "S");
  a.size = small(sizes[3], "D");
  IXT_CHECK(rotary_dim >= 0 && rotary_dim <= a.size && rotary_dim % 2 == 0,
            "`rotary_dim` must be even and at most ", a.size, ", got ", rotary_dim);
  a.rotary = rotary_dim ? static_cast<int>(rotary_dim) : a.size;
  IXT_CHECK(a.rotary > 0 && a.rotary % 2 == 0, "`", name,
            "` must have an even last size above 0, got ", a.size);
  const Tensor cos_rows = as_contiguous(cos);
  const Tensor sin_rows = as_contiguous(sin);
  set_tables(a, cos_rows, sin_rows, positions, x, name);
  a.x = x.const_data_ptr();
  a.x_b = x.strides()[0];
  a.x_h = x.strides()[1];
  a.x_s = x.strides()[2];
  const int64_t plane = int64_t{a.tokens} * a.size;
  const int64_t row = int64_t{a.heads} * a.size;
  a.y_b = a.heads * plane;
  a.y_h = token_major ? a.size : plane;
  a.y_s = token_major ? row : a.size;
  const int64_t shape[4] = {sizes[0], sizes[1], sizes[2], sizes[3]};
  Output y = token_major ? empty_token_major(shape, code_of(dtype), place)
                         : empty(shape, 4, code_of(dtype), place);
  a.y = y.data();
  a.transposed = transposed;
  with_type<bf16, f16>(dtype, [&](auto t) {
    using T = decltype(t);
    interleaved ? run<T, true>(a, place) : run<T, false>(a, place);
  });
  return y;
}

Output forward(const Tensor& x, const Tensor& cos, const Tensor& sin,
               const std::optional<Tensor>& positions, int64_t rotary_dim, bool interleaved) {
  return rotated(x, "x", cos, sin, positions, rotary_dim, interleaved, false, false);
}

Output backward(const Tensor& grad, const Tensor& cos, const Tensor& sin,
                const std::optional<Tensor>& positions, int64_t rotary_dim, bool interleaved,
                bool token_major) {
  return rotated(grad, "grad", cos, sin, positions, rotary_dim, interleaved, true, token_major);
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("rope", ixt::Boxed<ixt::forward>::call);
  m.impl("rope_backward", ixt::Boxed<ixt::backward>::call);
}
