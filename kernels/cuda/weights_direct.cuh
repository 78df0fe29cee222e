// The same products where a group is 64 bytes of a row or more: codes go from memory to registers.
//
// A block has Tiles * 16 rows of W, its warps share out K by pairs of steps (64 bytes of a row),
// warp w taking the pairs w, w + warps, ... A thread reads 16 bytes a step of each of its rows, those
// of both steps before the first is used: with one step at a time, and the next on its way, this
// took 130 us at 8192 x 28672 for 77, since a line of 128 bytes was then fetched in halves. Sixteen
// warps an SM keep the memory busy; x comes from the caches. Of a step, four threads have 16 bytes
// each of a row, so the k of an instruction are not neighbours: x is read in the same order. The
// order of a result's sum depends on n, k and the format, not on m or the card.
#pragma once

#include "weights.cuh"

namespace ixt {
namespace {

constexpr int kDirectThreads = 512;
constexpr int kStepBytes = 64;

// 16 bytes that nobody reads again; the other half of their line comes next.
__device__ __forceinline__ uint4 read_once(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The eight codes of unit `u` of 16 bytes.
template <Code C>
__device__ __forceinline__ auto unit_of(const uint4& v, int u) {
  if constexpr (Decoder<C, bf16>::bits == 8) {
    return u == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
  } else {
    return u == 0 ? v.x : u == 1 ? v.y : u == 2 ? v.z : v.w;
  }
}

// What a thread does of a step of 64 bytes of each row: 16 bytes of two rows of a tile.
template <Code C, bool Packed, typename T, int NT>
struct Step {
  static constexpr int bits = Decoder<C, T>::bits;
  static constexpr int length = 8 * kStepBytes / bits;  // elements of k
  static constexpr int units = 16 / bits;               // of 8 codes, a thread
  using X = uint32_t[units][NT][4];

  // Of unit u and rows 8 j to 8 j + 7 of x, zeros beyond it.
  static __device__ __forceinline__ uint4 x_at(const DecodeArgs& a, int step, int lane, int u, int j) {
    const int m = 8 * j + lane / 4;
    const int k = step * length + lane % 4 * (length / 4) + 8 * u;
    if (m >= a.m || k >= a.k) return uint4{0, 0, 0, 0};
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + int64_t{m} * a.k + k));
  }

  static __device__ __forceinline__ void read_x(const DecodeArgs& a, int step, int lane, X& x) {
#pragma unroll
    for (int u = 0; u < units; ++u) {
#pragma unroll
      for (int j = 0; j < NT; ++j) order_x<C>(x_at(a, step, lane, u, j), x[u][j]);
    }
  }

  // The group of the codes of row n.
  static __device__ __forceinline__ int group_of(const DecodeArgs& a, int n, int step) {
    return group_index(a, min(n, a.n - 1), step * length);
  }

  // The codes of two rows; `byte`: what belongs to their groups, where Packed.
  static __device__ __forceinline__ void multiply_by(const uint4 (&codes)[2], const X& x,
                                                     const uint32_t (&byte)[2],
                                                     const float (&scale)[2], float (&sum)[NT][4]) {
    constexpr uint32_t flip = kMagic<T> | (Packed ? 0u : twice(8u));
    float part[NT][4] = {};
#pragma unroll
    for (int u = 0; u < units; ++u) {
      uint32_t w[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Decoder<C, T>::pairs(unit_of<C>(codes[half], u), Decoder<C, T>::aid(byte[half]), flip,
                             w[half]);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        multiply<T>(part[j], w[0][0], w[1][0], w[0][1], w[1][1], x[u][j][0], x[u][j][1]);
        multiply<T>(part[j], w[0][2], w[1][2], w[0][3], w[1][3], x[u][j][2], x[u][j][3]);
      }
    }
    add_group<NT>(part, scale, sum);
  }
};

template <Code C, bool Packed, typename T, int NT, int Tiles>
__global__ void __launch_bounds__(kDirectThreads, 1)
    multiply_direct(const __grid_constant__ DecodeArgs a) {
  using S = Step<C, Packed, T, NT>;
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int first = blockIdx.x * Tiles * kTileRows;
  const int row = first + lane / 4;
  const int64_t pitch = int64_t{a.k} * S::bits / 8;
  const int64_t byte = lane % 4 * 16;
  const uint8_t* from = a.codes + row * pitch + byte;
  const int steps = static_cast<int>((pitch + kStepBytes - 1) / kStepBytes);
  float sum[Tiles][NT][4] = {};
#pragma unroll 1
  for (int step = threadIdx.x / kWarp * 2; step < steps; step += 2 * warps) {
    uint4 codes[2][Tiles][2];  // whole lines of 128 bytes
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int64_t at = int64_t{step + s} * kStepBytes;
      const int rows = at + byte < pitch ? a.n - row : 0;
#pragma unroll
      for (int r = 0; r < 2 * Tiles; ++r) {
        codes[s][r / 2][r % 2] = uint4{0, 0, 0, 0};
        if (8 * r < rows) codes[s][r / 2][r % 2] = read_once(from + 8 * r * pitch + at);
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (step + s >= steps) continue;
      typename S::X x;
      S::read_x(a, step + s, lane, x);
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        float scale[2];
        uint32_t of_group[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int group = S::group_of(a, row + i * kTileRows + 8 * half, step + s);
          scale[half] = a.scale == nullptr ? 1.0f : __ldg(a.scale + group);
          of_group[half] = Packed ? __ldg(a.packed + group) : 8;  // symmetric int4's zero point
        }
        S::multiply_by(codes[s][i], x, of_group, scale, sum[i]);
      }
    }
  }
  int turn = 0;
  write_tiles<C, T, NT, Tiles, kDirectThreads / kWarp>(a, first, Tiles, warps, turn, sum);
}

// The same sums in the same order, where registers allow it: a tile's codes and scales of the next
// pair are asked for as soon as those of this one are used, so that a warp never waits with nothing
// under way.
template <Code C, typename T, int NT, int Tiles, bool Scaled>
__global__ void __launch_bounds__(kDirectThreads, 1)
    multiply_refilled(const __grid_constant__ DecodeArgs a) {
  using S = Step<C, false, T, NT>;
  constexpr bool kAhead = NT == 1 && Tiles == 2 && S::bits == 8;  // x too
  constexpr int warps = kDirectThreads / kWarp;
  constexpr uint32_t none[2] = {8, 8};  // the zero point of symmetric int4
  const int lane = threadIdx.x % kWarp;
  const int first = blockIdx.x * Tiles * kTileRows;
  const int row = first + lane / 4;
  const int pitch = static_cast<int>(int64_t{a.k} * S::bits / 8);
  const int byte = lane % 4 * 16;
  const uint8_t* from = a.codes + int64_t{row} * pitch + byte;
  const int steps = (pitch + 2 * kStepBytes - 1) / (2 * kStepBytes) * 2;  // pairs: zeros beyond k
  uint4 codes[Tiles][2][2];
  float scale[Tiles][2][2];
  const auto fill = [&](int i, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = i * kTileRows + 8 * half;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int at = (step + s) * kStepBytes;
        codes[i][s][half] = uint4{0, 0, 0, 0};
        if (row + r < a.n && at + byte < pitch) {
          codes[i][s][half] = read_once(from + int64_t{r} * pitch + at);
        }
      }
    }
    if constexpr (Scaled) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int group = S::group_of(a, row + i * kTileRows + 8 * half, step + s);
          scale[i][s][half] = (step + s) * S::length < a.k ? __ldg(a.scale + group) : 0.0f;
        }
      }
    }
  };
  uint4 next[2][S::units][NT];
  const auto read_next = [&](int step) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int u = 0; u < S::units; ++u) {
#pragma unroll
        for (int j = 0; j < NT; ++j) next[s][u][j] = S::x_at(a, step + s, lane, u, j);
      }
    }
  };
  float sum[Tiles][NT][4] = {};
  int step = threadIdx.x / kWarp * 2;
  if (step < steps) {
#pragma unroll
    for (int i = 0; i < Tiles; ++i) fill(i, step);
  }
  if (kAhead) read_next(step);
#pragma unroll 1
  for (; step < steps; step += 2 * warps) {
    if (!kAhead) read_next(step);
    typename S::X x[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int u = 0; u < S::units; ++u) {
#pragma unroll
        for (int j = 0; j < NT; ++j) order_x<C>(next[s][u][j], x[s][u][j]);
      }
    }
    if (kAhead) read_next(step + 2 * warps);
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float of_rows[2] = {Scaled ? scale[i][s][0] : 1.0f, Scaled ? scale[i][s][1] : 1.0f};
        S::multiply_by(codes[i][s], x[s], none, of_rows, sum[i]);
      }
      if (step + 2 * warps < steps) fill(i, step + 2 * warps);
    }
  }
  int turn = 0;
  write_tiles<C, T, NT, Tiles, warps>(a, first, Tiles, warps, turn, sum);
}

}  // namespace
}  // namespace ixt
