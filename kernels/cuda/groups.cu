// INT8 and INT4 with one scale a group of 32 to 256 elements of a row.
//
// A thread takes chunks of 16 elements, the lanes of a group reduce by shuffles, and the chunk stays
// in registers between scale and codes. Where chunks are not aligned or a row ends within a group,
// a warp takes a group, element by element.
#include "int_device.cuh"
#include "int_launch.h"
#include "tile_device.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16;
constexpr float kInt4Max = 7.0f;

template <typename T>
constexpr int kUnroll = sizeof(T) == 4 ? 1 : 2;  // chunks a thread: 64 bytes in flight

__device__ __forceinline__ float group_max(float value, int lanes) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (step < lanes) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  }
  return value;
}

// What a group's codes are made with.
struct GroupScale {
  float scale;
  int32_t zero;
};

// The largest number of two words each, NaN ignored.
template <typename T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
    return bit_copy<uint32_t>(__hmax2(bit_copy<Pair>(a), bit_copy<Pair>(b)));
  }
}

// How far the elements go above zero, or (negated) below it; NaN ignored.
template <typename T, int W>
__device__ __forceinline__ float reach(const uint32_t (&words)[W], uint32_t negate) {
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < W; ++i) best = larger<T>(best, words[i] ^ negate);
  return magnitude<T>(best);
}

template <typename T, int W>
__device__ __forceinline__ float magnitude_of(const uint32_t (&words)[W]) {
  uint32_t best = max_magnitude<T>(words[0], words[1]);
#pragma unroll
  for (int i = 2; i < W; ++i) best = max_magnitude<T>(best, words[i]);
  return magnitude<T>(best);
}

// Scale and zero of the group that `lanes` lanes hold, `words` being the elements of this one.
template <Codes C, typename T, int W>
__device__ __forceinline__ GroupScale group_scale(const uint32_t (&words)[W], int lanes) {
  if constexpr (C == Codes::int4_asymmetric) {
    const float above = group_max(reach<T>(words, 0), lanes);
    const float below = group_max(reach<T>(words, sizeof(T) == 4 ? 0x80000000u : 0x80008000u),
                                  lanes);
    const float scale = int_scale<15>(above + below);
    bool safe = true;
    const float shifted = Reciprocal(scale).round(below, safe);
    const int32_t zero = min(__float_as_int(shifted) - kRounderBits, 15);
    return {scale, safe ? zero : asymmetric_zero({below, above}, scale)};
  } else {
    const float amax = group_max(magnitude_of<T>(words), lanes);
    return {C == Codes::int8 ? int_scale<127>(amax) : int_scale<7>(amax), 0};
  }
}

// One code by exact division, as an integer of which the low bits count.
template <Codes C>
__device__ __forceinline__ int32_t exact_code(float v, const GroupScale& g) {
  if constexpr (C == Codes::int8) return int_code(v, g.scale, -kInt8Max, kInt8Max);
  if constexpr (C == Codes::int4_symmetric) return int_code(v, g.scale, -8.0f, kInt4Max);
  return asymmetric_code(v, g.scale, g.zero);
}

// Sum of 2^(4 i) kRounderBits for i of 0..7, modulo 2^32.
constexpr uint32_t kRounderSum = 0x3F400000u;
static_assert(kRounderSum == static_cast<uint32_t>(kRounderBits) * 0x11111111u);

// Eight codes in nibbles, the first in the lowest one.
template <Codes C>
__device__ __forceinline__ uint32_t encode_eight(const float* v, const GroupScale& g) {
  const Reciprocal by(g.scale);
  const float top = kRounder + static_cast<float>(15 - g.zero);
  bool safe = true;
  uint32_t shifted[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float rounded = by.round(v[i], safe);
    shifted[i] = __float_as_uint(C == Codes::int4_asymmetric ? fminf(rounded, top) : rounded);
  }
  // Half of the warps have an element in doubt (amax / 2 is a tie), few have two: only that one is
  // divided.
  if (!safe) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (by.in_doubt(v[i])) shifted[i] = kRounderBits + exact_code<C>(v[i], g) - g.zero;
    }
  }
  uint32_t sum = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) sum = sum * 16u + shifted[i];
  // Nibbles of 0..15: codes + zero, or codes + 8, whose top bit is then that of two's complement.
  const uint32_t word = sum - kRounderSum;
  if constexpr (C == Codes::int4_asymmetric) {
    return word + static_cast<uint32_t>(g.zero) * 0x11111111u;
  } else {
    return (word + 0x88888888u) ^ 0x88888888u;
  }
}

template <Codes C>
__device__ __forceinline__ void store_chunk(const GroupArgs& a, int64_t chunk,
                                            const float (&v)[kChunk], const GroupScale& g) {
  if constexpr (C == Codes::int8) {
    reinterpret_cast<uint4*>(a.q)[chunk] = {
        encode_four<Int8>(v, g.scale), encode_four<Int8>(v + 4, g.scale),
        encode_four<Int8>(v + 8, g.scale), encode_four<Int8>(v + 12, g.scale)};
  } else {
    reinterpret_cast<uint2*>(a.q)[chunk] = {encode_eight<C>(v, g), encode_eight<C>(v + 8, g)};
  }
}

template <Codes C>
__device__ __forceinline__ void store_group(const GroupArgs& a, int64_t at, const GroupScale& g) {
  a.scale[at] = g.scale;
  if constexpr (C == Codes::int4_asymmetric) a.zero[at] = static_cast<uint8_t>(g.zero);
}

// Rows of whole groups, 16-byte aligned. A group is wholly within a warp.
template <typename T, Codes C>
__global__ void __launch_bounds__(kThreads)
    quantize_chunks(const __grid_constant__ GroupArgs a, int64_t chunks, int shift, bool narrow) {
  constexpr int U = kUnroll<T>;
  constexpr int W = kChunk * sizeof(T) / 4;
  const int lanes = 1 << shift;
  const int64_t first = blockIdx.x * int64_t{kThreads * U} + threadIdx.x;
  const auto* x = static_cast<const T*>(a.x);
  uint32_t words[U][W];
  int64_t at[U];  // before the loads: no branch may stand between them
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t chunk = first + u * kThreads;
    at[u] = chunk * kChunk;
    if (a.stride != a.cols) {  // narrow: 32-bit division is several times cheaper
      const int64_t per_row = a.cols / kChunk;
      const int64_t row = narrow ? static_cast<uint32_t>(chunk) / static_cast<uint32_t>(per_row)
                                 : chunk / per_row;
      at[u] += row * (a.stride - a.cols);
    }
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t chunk = first + u * kThreads;
#pragma unroll
    for (int part = 0; part < W / 4; ++part) {
      Raw<16> raw{0u, 0u, 0u, 0u};
      if (chunk < chunks) raw = __ldg(reinterpret_cast<const Raw<16>*>(x + at[u]) + part);
      memcpy(words[u] + 4 * part, &raw, 16);
    }
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t chunk = first + u * kThreads;
    const GroupScale g = group_scale<C, T>(words[u], lanes);
    if (chunk >= chunks) continue;
    float v[kChunk];
    unpack_all<T>(words[u], v);
    store_chunk<C>(a, chunk, v, g);
    if ((threadIdx.x & (lanes - 1)) == 0) store_group<C>(a, chunk >> shift, g);
  }
}

template <typename T>
__device__ __forceinline__ float float_at(const T* x) {
  float v[2];
  uint32_t word[1];
  to_words(*reinterpret_cast<const Raw<sizeof(T)>*>(x), word);
  unpack<T>(word[0], v);
  return v[0];
}

// Any rows: a warp takes a group, a lane takes pairs of elements.
template <typename T, Codes C>
__global__ void __launch_bounds__(kThreads)
    quantize_any(const __grid_constant__ GroupArgs a, int64_t groups) {
  constexpr int kPairs = 4;  // of a lane, in the largest group
  const int64_t at = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp;
  if (at >= groups) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t per_row = (a.cols + a.group - 1) / a.group;
  const int64_t row = at / per_row;
  const int64_t start = (at - row * per_row) * a.group;
  const int count = static_cast<int>(min(int64_t{a.group}, a.cols - start));
  const T* x = static_cast<const T*>(a.x) + row * a.stride + start;
  float v[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const int k = 2 * (lane + kWarp * (i / 2)) + i % 2;
    v[i] = k < count ? float_at(x + k) : 0.0f;
  }
  uint32_t words[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) words[i] = __float_as_uint(v[i]);
  const GroupScale g = group_scale<C, float>(words, kWarp);
  if (lane == 0) store_group<C>(a, at, g);
  const int64_t out = row * a.cols + start;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int k = 2 * (lane + kWarp * i);
    const int32_t low = exact_code<C>(v[2 * i], g);
    const int32_t high = exact_code<C>(v[2 * i + 1], g);
    if constexpr (C == Codes::int8) {
      if (k < count) a.q[out + k] = static_cast<uint8_t>(low);
      if (k + 1 < count) a.q[out + k + 1] = static_cast<uint8_t>(high);
    } else if (k < count) {
      a.q[(out + k) / 2] = static_cast<uint8_t>((low & 15) | high << 4);
    }
  }
}

template <typename T, Codes C>
void run(const GroupArgs& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool aligned = aligned16(a.x) && (a.rows == 1 || a.stride % N == 0);
  if (aligned && a.cols % a.group == 0) {
    const int64_t chunks = a.rows * a.cols / kChunk;
    const int64_t tile = int64_t{kThreads} * kUnroll<T>;
    int shift = 0;
    while (kChunk << shift < a.group) ++shift;
    launch(quantize_chunks<T, C>, (chunks + tile - 1) / tile, kThreads, stream, false, a, chunks,
           shift, chunks <= 0xFFFFFFFFll);
  } else {
    const int64_t groups = a.rows * ((a.cols + a.group - 1) / a.group);
    constexpr int64_t tile = kThreads / kWarp;
    launch(quantize_any<T, C>, (groups + tile - 1) / tile, kThreads, stream, false, a, groups);
  }
}

}  // namespace

void launch_quantize_groups(const GroupArgs& args, Codes codes, Float in, Target target) {
  if (args.rows == 0 || args.cols == 0) return;
  with_type<bf16, f16>(in, [&](auto t) {
    using T = decltype(t);
    if (codes == Codes::int8) {
      run<T, Codes::int8>(args, target.stream);
    } else if (codes == Codes::int4_symmetric) {
      run<T, Codes::int4_symmetric>(args, target.stream);
    } else {
      run<T, Codes::int4_asymmetric>(args, target.stream);
    }
  });
}

}  // namespace ixt
