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

// A thread's part of a step: 16 bytes of two rows of each tile.
template <Code C, bool Packed, typename T, int NT, int Tiles>
struct Step {
  static constexpr int bits = Decoder<C, T>::bits;
  static constexpr int length = 8 * kStepBytes / bits;  // elements of k
  static constexpr int units = 16 / bits;               // of 8 codes, a thread
  uint4 codes[Tiles][2];

  // `from`: its bytes in its first row, `pitch` bytes long; `rows`: the first row and those below it.
  __device__ __forceinline__ void read(const uint8_t* from, int64_t pitch, int rows) {
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * kTileRows + 8 * half;
        codes[i][half] = uint4{0, 0, 0, 0};
        if (row < rows) codes[i][half] = read_once(from + row * pitch);
      }
    }
  }

  // `row`: this thread's first.
  __device__ __forceinline__ void multiply_by(const DecodeArgs& a, int step, int row, int lane,
                                              float (&sum)[Tiles][NT][4]) const {
    constexpr uint32_t flip = kMagic<T> | (Packed ? 0u : twice(8u));
    uint32_t x[units][NT][4];
#pragma unroll
    for (int u = 0; u < units; ++u) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int m = 8 * j + lane / 4;
        const int k = step * length + lane % 4 * (length / 4) + 8 * u;
        uint4 v{0, 0, 0, 0};
        if (m < a.m && k < a.k) {
          v = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) +
                                                   int64_t{m} * a.k + k));
        }
        order_x<C>(v, x[u][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
      float part[NT][4] = {};
      float scale[2];
      uint32_t byte[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = min(row + i * kTileRows + 8 * half, a.n - 1);
        const int group = group_index(a, n, step * length);
        scale[half] = a.scale == nullptr ? 1.0f : __ldg(a.scale + group);
        byte[half] = Packed ? __ldg(a.packed + group) : 8;  // the zero point of symmetric int4
      }
#pragma unroll
      for (int u = 0; u < units; ++u) {
        uint32_t w[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Decoder<C, T>::pairs(unit_of<C>(codes[i][half], u), Decoder<C, T>::aid(byte[half]),
                               flip, w[half]);
        }
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          multiply<T>(part[j], w[0][0], w[1][0], w[0][1], w[1][1], x[u][j][0], x[u][j][1]);
          multiply<T>(part[j], w[0][2], w[1][2], w[0][3], w[1][3], x[u][j][2], x[u][j][3]);
        }
      }
      add_group<NT>(part, scale, sum[i]);
    }
  }
};

template <Code C, bool Packed, typename T, int NT, int Tiles>
__global__ void __launch_bounds__(kDirectThreads, 1)
    multiply_direct(const __grid_constant__ DecodeArgs a) {
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int first = blockIdx.x * Tiles * kTileRows;
  const int row = first + lane / 4;
  const int64_t pitch = int64_t{a.k} * Decoder<C, T>::bits / 8;
  const int64_t byte = lane % 4 * 16;
  const uint8_t* from = a.codes + row * pitch + byte;
  const int steps = static_cast<int>((pitch + kStepBytes - 1) / kStepBytes);
  float sum[Tiles][NT][4] = {};
#pragma unroll 1
  for (int step = threadIdx.x / kWarp * 2; step < steps; step += 2 * warps) {
    Step<C, Packed, T, NT, Tiles> codes[2];  // whole lines of 128 bytes
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int64_t at = int64_t{step + s} * kStepBytes;
      codes[s].read(from + at, pitch, at + byte < pitch ? a.n - row : 0);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (step + s < steps) codes[s].multiply_by(a, step + s, row, lane, sum);
    }
  }
  int turn = 0;
  write_tiles<C, T, NT, Tiles, kDirectThreads / kWarp>(a, first, Tiles, warps, turn, sum);
}

}  // namespace
}  // namespace ixt
