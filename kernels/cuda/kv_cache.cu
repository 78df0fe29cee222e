// Append new keys and values to a KV cache on CUDA: read, quantize and write in one kernel.
//
// Lanes of a warp take one row, that is one token and head of the keys or of the values: packs of
// 16 bytes in, their codes out to the token's place. Where that is comes from device memory, and a
// place that is not in the cache is written nowhere.
#include <optional>

#include "../common/int_args.h"
#include "../common/like_args.h"
#include "floats.cuh"
#include "int_device.cuh"
#include "int_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 128;
constexpr int kHeld = 4;  // packs a lane
constexpr int kLargestHead = 512;

struct Copied {};  // codes that are the values

// Keys, or values.
struct Side {
  const void* x;
  int64_t x_b, x_h, x_s;
  void* cache;
  int64_t c_o, c_h, c_t;
  float* scales;  // written, one a row
  int64_t s_o, s_h, s_t;
  const float* scale;  // given, or nullptr
};

struct AppendArgs {
  Side side[2];
  const int32_t* lengths;
  const void* positions;
  bool wide_positions;  // int64
  const int32_t* table;
  int64_t l_b, p_b, p_s, t_b, t_n;
  int64_t page, outer;  // tokens, and how many pages or sequences there are
  int64_t capacity;     // tokens of a sequence
  int64_t rows;
  int heads, tokens, size;
  int lanes;
  bool wide;
  ScaleRule rule;
};

struct Place2 {
  int64_t outer, slot;
  bool inside;
};

__device__ __forceinline__ Place2 place_of_token(const AppendArgs& a, int64_t b, int s) {
  int64_t at;
  if (a.positions == nullptr) {
    at = int64_t{a.lengths[b * a.l_b]} - a.tokens + s;
  } else {
    const int64_t from = b * a.p_b + s * a.p_s;
    at = a.wide_positions ? static_cast<const int64_t*>(a.positions)[from]
                          : static_cast<const int32_t*>(a.positions)[from];
  }
  if (at < 0 || at >= a.capacity) return {0, 0, false};
  if (a.table == nullptr) return {b, at, true};
  // Positions below 2^31 tokens: lengths are int32, and so is what a cache can hold.
  const auto token = static_cast<uint32_t>(at);
  const auto page = static_cast<uint32_t>(a.page);
  const int64_t outer = a.table[b * a.t_b + token / page * a.t_n];
  return {outer, token % page, outer >= 0 && outer < a.outer};
}

template <typename T>
struct Held {
  Pack<T> pack[kHeld];

  __device__ __forceinline__ void load_row(const T* row, int lane, int lanes, int size, bool wide) {
    constexpr int N = Pack<T>::N;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = (lane + i * lanes) * N;
      pack[i] = bit_copy<Pack<T>>(uint4{0u, 0u, 0u, 0u});
      if (at < size) pack[i] = wide ? load<true>(row, at, size) : load<false>(row, at, size);
    }
  }

  __device__ __forceinline__ float amax() const {
    Amax<T> best;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) add_raw(best, bit_copy<uint4>(pack[i]));
    return best.value();
  }

  // f(pack, its first element)
  template <typename F>
  __device__ __forceinline__ void each(int lane, int lanes, int size, const F& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = (lane + i * lanes) * Pack<T>::N;
      if (at < size) f(pack[i], at);
    }
  }
};

template <typename T, typename Format>
__device__ __forceinline__ void store_codes(uint8_t* row, int at, int size, bool wide,
                                            const Pack<T>& pack, float scale) {
  constexpr int N = Pack<T>::N;
  if (wide) {
    *reinterpret_cast<Raw<N>*>(row + at) =
        quantize<T, Format, N>(bit_copy<Raw<N * sizeof(T)>>(pack), scale);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (at + i < size) {
      row[at + i] = quantize<T, Format, 1>(bit_copy<Raw<sizeof(T)>>(pack.at[i]), scale);
    }
  }
}

template <typename T, typename Format, bool Rows>
__global__ void __launch_bounds__(kThreads) append(const __grid_constant__ AppendArgs a) {
  const int lane = threadIdx.x & (a.lanes - 1);
  const int64_t number = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / a.lanes;
  // All lanes of a warp take part in the shuffles: none returns before.
  const auto row = static_cast<uint32_t>(number < a.rows ? number : 0);
  const Side& side = a.side[row & 1];
  const uint32_t of_token = row >> 1;
  const int h = static_cast<int>(of_token % a.heads);
  const uint32_t token = of_token / a.heads;
  const int s = static_cast<int>(token % a.tokens);
  const int64_t b = token / a.tokens;
  Place2 to = place_of_token(a, b, s);
  to.inside = to.inside && number < a.rows;

  const T* x = static_cast<const T*>(side.x) + b * side.x_b + h * side.x_h + s * side.x_s;
  Held<T> held;
  held.load_row(x, lane, a.lanes, to.inside ? a.size : 0, a.wide);
  const int64_t place = to.outer * side.c_o + h * side.c_h + to.slot * side.c_t;
  if constexpr (std::is_same_v<Format, Copied>) {
    if (!to.inside) return;
    T* cache = static_cast<T*>(side.cache) + place;
    held.each(lane, a.lanes, a.size, [&](const Pack<T>& pack, int at) {
      a.wide ? store<true>(cache, at, a.size, pack) : store<false>(cache, at, a.size, pack);
    });
  } else {
    float scale = side.scale == nullptr ? 1.0f : __fdiv_rn(1.0f, *side.scale);
    if constexpr (Rows) {
      float amax = held.amax();
      for (int step = a.lanes / 2; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
      }
      scale = scale_from_amax<Format>(amax, a.rule);
    }
    if (!to.inside) return;
    if (Rows && lane == 0) {
      side.scales[to.outer * side.s_o + h * side.s_h + to.slot * side.s_t] =
          stored_scale<Format>(scale);
    }
    uint8_t* cache = static_cast<uint8_t*>(side.cache) + place;
    held.each(lane, a.lanes, a.size, [&](const Pack<T>& pack, int at) {
      store_codes<T, Format>(cache, at, a.size, a.wide, pack, scale);
    });
  }
}

// ---- host

using Maybe = std::optional<Tensor>;

void check_i32(const Tensor& t, const char* name, Place place) {
  check_dtype(t, name, aoti_torch_dtype_int32());
  check_device(t, name, "k_cache", place);
}

Side side_of(const Tensor& cache, const Tensor& x, const char* name) {
  const auto c = cache.strides();
  IXT_CHECK(cache.dim() == 4 && c[3] == 1, "`", name,
            "_cache` must have 4 dimensions and stride 1 in the last");
  const auto s = x.strides();
  check_not_expanded(cache, name);
  Side side{};
  side.x = x.const_data_ptr();
  side.x_b = s[0];
  side.x_h = s[1];
  side.x_s = s[2];
  side.cache = cache.mutable_data_ptr();
  side.c_o = c[0];
  side.c_h = c[1];
  side.c_t = c[2];
  return side;
}

void set_places(AppendArgs& a, const Tensor& cache, int64_t batch, const Tensor& lengths,
                const Maybe& positions, const Maybe& table, Place place) {
  check_i32(lengths, "lengths", place);
  IXT_CHECK(has_shape(lengths, {batch}), "`lengths` must have the shape (", batch, ",), got ",
            shape_text(lengths));
  a.lengths = static_cast<const int32_t*>(lengths.const_data_ptr());
  a.l_b = lengths.strides()[0];
  a.outer = cache.size(0);
  a.page = cache.size(2);
  a.capacity = a.page;
  if (positions) {
    const int32_t dtype = dtype_code(*positions);
    a.wide_positions = dtype == aoti_torch_dtype_int64();
    if (!a.wide_positions) check_dtype(*positions, "positions", aoti_torch_dtype_int32());
    check_device(*positions, "positions", "k_cache", place);
    IXT_CHECK(has_shape(*positions, {batch, a.tokens}), "`positions` must have the shape (", batch,
              ", ", a.tokens, "), got ", shape_text(*positions));
    a.positions = positions->const_data_ptr();
    a.p_b = positions->strides()[0];
    a.p_s = positions->strides()[1];
  }
  if (!table) {
    IXT_CHECK(a.outer == batch, "`k_cache` must hold ", batch, " sequences, got ", a.outer);
    return;
  }
  check_i32(*table, "block_table", place);
  IXT_CHECK(table->dim() == 2 && table->size(0) == batch,
            "`block_table` must have the shape (B, N), got ", shape_text(*table));
  a.table = static_cast<const int32_t*>(table->const_data_ptr());
  a.t_b = table->strides()[0];
  a.t_n = table->strides()[1];
  a.capacity = a.page * table->size(1);
  IXT_CHECK(a.capacity <= 0x7FFFFFFF, "`block_table` must hold less than 2^31 tokens a sequence");
  if (table->size(1) == 0) a.capacity = 0;
}

// Whether rows begin at multiples of a pack, in memory of `bytes` an element.
bool steps_in_packs(const void* data, std::initializer_list<int64_t> strides, int64_t n,
                    int64_t bytes) {
  bool ok = reinterpret_cast<uintptr_t>(data) % (n * bytes) == 0;
  for (const int64_t stride : strides) ok = ok && stride % n == 0;
  return ok;
}

struct Call {
  AppendArgs args{};
  Float in = Float::f32;
  Tensor k, v;  // own the data
};

Call call_of(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_any,
             const Tensor& v_any, const Tensor& lengths, const Maybe& positions,
             const Maybe& table, Place place) {
  check_like(v_cache, "v_cache", k_cache, "k_cache");
  const Float in = float_dtype(k_any, "k");
  check_like(v_any, "v", k_any, "k");
  check_device(k_any, "k", "k_cache", place);
  IXT_CHECK(k_any.dim() == 4 && k_cache.dim() == 4 && k_any.size(1) == k_cache.size(1) &&
                k_any.size(3) == k_cache.size(3),
            "`k` must have the shape (B, H, S, D) of the cache's H and D, got ",
            shape_text(k_any));
  const auto with_rows = [](const Tensor& t) {
    return t.strides()[3] == 1 || t.size(3) == 1 ? t : torch::stable::contiguous(t);
  };
  Call call{{}, in, with_rows(k_any), with_rows(v_any)};
  AppendArgs& a = call.args;
  const int64_t head = k_any.size(3);
  IXT_CHECK(head >= 1 && head <= kLargestHead, "`k_cache` must have a last size of 1 to ",
            kLargestHead, ", got ", head);
  a.rows = 2 * k_any.size(0) * k_any.size(1) * k_any.size(2);
  IXT_CHECK(a.rows <= 0x7FFFFFFF, "`k` must have less than 2^30 rows, got ", a.rows / 2);
  a.size = static_cast<int>(head);
  a.heads = static_cast<int>(k_any.size(1));
  a.tokens = static_cast<int>(k_any.size(2));
  a.side[0] = side_of(k_cache, call.k, "k");
  a.side[1] = side_of(v_cache, call.v, "v");
  set_places(a, k_cache, k_any.size(0), lengths, positions, table, place);
  const int64_t element = element_size(in);
  const int64_t n = 16 / element;
  const int64_t code = dtype_code(k_cache) == dtype_code(k_any) ? element : 1;
  a.wide = head % n == 0;
  for (const Side& side : a.side) {
    a.wide = a.wide && steps_in_packs(side.x, {side.x_b, side.x_h, side.x_s}, n, element) &&
             steps_in_packs(side.cache, {side.c_o, side.c_h, side.c_t}, n, code);
  }
  a.lanes = 1;
  while (a.lanes < kWarp && a.lanes * n < head) a.lanes *= 2;
  a.rule = {0.0f, max_finite(in), false};
  return call;
}

template <typename Format, bool Rows>
void run(const Call& call, Place place) {
  if (call.args.rows == 0) return;
  const int64_t threads = call.args.rows * call.args.lanes;
  with_type<bf16, f16>(call.in, [&](auto t) {
    using T = decltype(t);
    launch(append<T, Format, Rows>, (threads + kThreads - 1) / kThreads, kThreads,
           current_stream(place.index), false, call.args);
  });
}

std::tuple<> append_kv_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                        const Tensor& v, const Tensor& lengths, const Maybe& positions,
                        const Maybe& table, const Maybe& k_scale, const Maybe& v_scale) {
  const Place place = place_of(k_cache);
  const DeviceScope scope(place.index);
  Call call = call_of(k_cache, v_cache, k, v, lengths, positions, table, place);
  if (dtype_code(k_cache) == dtype_code(k)) {
    IXT_CHECK(!k_scale && !v_scale, "`k_scale` must be None for a cache that is not quantized");
    run<Copied, false>(call, place);
    return {};
  }
  const Maybe* scales[2] = {&k_scale, &v_scale};
  for (int i = 0; i < 2; ++i) {
    if (!*scales[i]) continue;
    const Tensor& scale = **scales[i];
    const char* name = i ? "v_scale" : "k_scale";
    check_dtype(scale, name, dtype_codes().f32);
    check_device(scale, name, "k_cache", place);
    IXT_CHECK(scale.numel() == 1, "`", name, "` must have one element, got ", shape_text(scale));
    call.args.side[i].scale = static_cast<const float*>(scale.const_data_ptr());
  }
  fp8_dtype(k_cache, "k_cache") == Fp8::e4m3 ? run<E4M3, false>(call, place)
                                             : run<E5M2, false>(call, place);
  return {};
}

std::tuple<> append_kv_row_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_scale,
                            const Tensor& v_scale, const Tensor& k, const Tensor& v,
                            const Tensor& lengths, const Maybe& positions, const Maybe& table) {
  const Place place = place_of(k_cache);
  const DeviceScope scope(place.index);
  Call call = call_of(k_cache, v_cache, k, v, lengths, positions, table, place);
  const Tensor* scales[2] = {&k_scale, &v_scale};
  for (int i = 0; i < 2; ++i) {
    const char* name = i ? "v_scale" : "k_scale";
    check_dtype(*scales[i], name, dtype_codes().f32);
    check_device(*scales[i], name, "k_cache", place);
    IXT_CHECK(has_shape(*scales[i], with_columns(k_cache, 1)), "`", name,
              "` must have a scale a token and head, got ", shape_text(*scales[i]));
    check_not_expanded(*scales[i], name);
    const auto strides = scales[i]->strides();
    Side& side = call.args.side[i];
    side.scales = static_cast<float*>(scales[i]->mutable_data_ptr());
    side.s_o = strides[0];
    side.s_h = strides[1];
    side.s_t = strides[2];
  }
  if (dtype_code(k_cache) == int_dtypes().i8) {
    run<Int8, true>(call, place);
  } else {
    fp8_dtype(k_cache, "k_cache") == Fp8::e4m3 ? run<E4M3, true>(call, place)
                                               : run<E5M2, true>(call, place);
  }
  return {};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("append_kv_", ixt::Boxed<ixt::append_kv_>::call);
  m.impl("append_kv_row_", ixt::Boxed<ixt::append_kv_row_>::call);
}
