// y (m, n) = x (m, k) @ W^T for m <= 16, W quantized: the memory is read once, tensor cores multiply.
//
// W is the operand with 16 rows, x the one with 8 columns (twice where m > 8). A block has a share
// of the tiles of 16 rows of W, and takes up to kTiles of them at a time ("a pass"); its warps split
// K among them, stage by stage (64 bytes of a row), warp w taking the stages w, w + 8, ... A warp
// reads ahead into a ring of its own in shared memory, so no barrier is in the loop; what the warps
// have summed is added in their order at the end of a pass. The order of a result's sum depends on
// k and the format alone, not on m, n or the card.
//
// Codes are exact in bf16 and fp16, products are exact in fp32. The sum of a group, or of a stage of
// a longer one, starts at zero, is multiplied by the group's scale and added to the total. Groups of
// e2m1 are shorter than what an instruction multiplies: their scales are multiplied into the codes,
// which is exact as well.
#pragma once

#include "../common/mxfp8.h"
#include "weight_codes.cuh"

namespace ixt {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileRows = 16;
constexpr int kUnit = 32;   // elements of k that a quad of threads decodes at once, 8 each
constexpr int kMostStages = 8;
constexpr int kPad = 64;    // bytes; keeps the units of a row on different banks
constexpr int kColumn = 20;                   // floats from a column of a tile's sums to the next

// Where things lie in a stage: x by units, then the codes by tiles and units, then the scales.
template <Code C, int NT>
struct Layout {
  static constexpr int bits = Decoder<C, bf16>::bits;
  static constexpr int stage = 512 / bits;  // elements of k
  static constexpr int units = stage / kUnit;
  static constexpr int x_unit = 8 * NT * kUnit * 2 + kPad;
  static constexpr int x_bytes = units * x_unit;
  static constexpr int row = kUnit * bits / 8;
  static constexpr int unit = kTileRows * row + kPad;
  static constexpr int tile = units * unit;
  static constexpr int tiles = bits == 8 ? 4 : 8;  // at most, of a pass: limited by registers
};

__device__ __forceinline__ int group_index(const DecodeArgs& a, int row, int k) {
  return (row >> a.row_shift) * a.groups + (k >> a.group_shift);
}

// A word of which the first `bytes` exist; the others are zero. The last ones of an array come by
// themselves: a copy of a part of a word touches all of it. Who reads them has a __syncwarp()
// before, as for copies.
__device__ __forceinline__ void copy_word(char* shared, const uint8_t* global, int bytes) {
  if (bytes >= 4) return copy4(shared, global);
  for (int i = 0; i < 4; ++i) shared[i] = i < bytes ? static_cast<char>(__ldg(global + i)) : 0;
}

// Begin to copy what a stage needs; `lane` of the warp has its part of each row.
template <Code C, bool Packed, typename T, int NT>
__device__ __forceinline__ void copy_stage(const DecodeArgs& a, char* slot, int stage, int tile,
                                           int count, int lane) {
  using L = Layout<C, NT>;
  const int k = stage * L::stage;
  constexpr int x_chunks = L::stage / 8;  // of 16 bytes, a row
#pragma unroll
  for (int c = 0; c < 8 * NT * x_chunks / kWarp; ++c) {
    const int row = (lane + kWarp * c) / x_chunks;
    const int chunk = (lane + kWarp * c) % x_chunks;
    if (row < a.m) {
      copy16(slot + chunk / 4 * L::x_unit + row * 64 + chunk % 4 * 16,
             static_cast<const T*>(a.x) + int64_t{row} * a.k + k + 8 * chunk, k + 8 * chunk < a.k);
    }
  }
  const int64_t pitch = int64_t{a.k} * L::bits / 8;
  const int64_t begin = int64_t{k} * L::bits / 8;
#pragma unroll
  for (int c = 0; c < 2; ++c) {  // 4 chunks a row
    const int row = (lane + kWarp * c) / 4;
    const int byte = lane % 4 * 16;
    const uint8_t* from = a.codes + (int64_t{tile} * kTileRows + row) * pitch + begin + byte;
    char* to = slot + L::x_bytes + byte / L::row * L::unit + row * L::row + byte % L::row;
    // Rows of this thread that are inside, times 16; none behind the end of k.
    const int rows = begin + byte < pitch ? a.n - tile * kTileRows - row : 0;
    for (int i = 0; i < count; ++i, from += kTileRows * pitch, to += L::tile) {
      copy16(to, from, i * kTileRows < rows);
    }
  }
  if (!Packed && a.scale == nullptr) return;
  for (int entry = lane / kTileRows; entry < a.entries; entry += kWarp / kTileRows) {
    // An entry behind the end of k, and a row behind that of n, take the last one's number.
    const int at = min(k + (entry << a.entry_shift) * kUnit, a.k - 1);
    const int first = tile * kTileRows + lane % kTileRows;
    const int place = 4 * (entry * kTileRows + lane % kTileRows);
    for (int i = 0; i < count; ++i) {
      const int group = group_index(a, min(first + i * kTileRows, a.n - 1), at);
      const int to = i * a.entries * kTileRows * 4 + place;
      if (a.scale != nullptr) copy4(slot + a.scale_at + to, a.scale + group);
      if constexpr (Packed) {  // the four bytes around it
        const int four = group & ~3;
        copy_word(slot + a.packed_at + to, a.packed + four, a.packed_bytes - four);
      }
    }
  }
}

__device__ __forceinline__ uint32_t read32(const char* p) {
  return *reinterpret_cast<const uint32_t*>(p);
}

template <Code C>
__device__ __forceinline__ auto read_codes(const char* p) {
  if constexpr (Decoder<C, bf16>::bits == 8) {
    return *reinterpret_cast<const uint2*>(p);
  } else {
    return read32(p);
  }
}

// Eight elements of x, paired as the codes are.
template <Code C>
__device__ __forceinline__ void order_x(const uint4& v, uint32_t (&b)[4]) {
  if constexpr (Decoder<C, bf16>::bits == 8) {
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  } else {
    b[0] = __byte_perm(v.x, v.z, 0x5410), b[1] = __byte_perm(v.x, v.z, 0x7632);
    b[2] = __byte_perm(v.y, v.w, 0x5410), b[3] = __byte_perm(v.y, v.w, 0x7632);
  }
}

// x of a unit: the thread's eight elements of each column.
template <Code C, int NT>
__device__ __forceinline__ void read_x(const char* unit, int lane, uint32_t (&b)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const char* at = unit + (8 * j + lane / 4) * 64 + lane % 4 * 16;
    order_x<C>(*reinterpret_cast<const uint4*>(at), b[j]);
  }
}

// Where the number of a unit's group lies, of row `row` of tile `i`.
__device__ __forceinline__ int entry_at(const DecodeArgs& a, int i, int u, int row) {
  return 4 * ((i * a.entries + (u >> a.entry_shift)) * kTileRows + row);
}

// The byte of the group that begins with a unit: it was copied with its three neighbours.
template <Code C, int NT>
__device__ __forceinline__ uint32_t packed_byte(const DecodeArgs& a, const char* slot, int i, int u,
                                                int row, int tile, int stage, int lane) {
  const int n = min((tile + i) * kTileRows + row, a.n - 1);
  constexpr int last = C == Code::e2m1 ? kUnit : 1;  // behind the end: this row's last, not the next
  int place = group_index(a, n, min(stage * Layout<C, NT>::stage + u * kUnit, a.k - last)) & 3;
  if constexpr (C == Code::e2m1) place += lane % 4 / 2;  // a unit has two groups, place is even
  return __byte_perm(read32(slot + a.packed_at + entry_at(a, i, u, row)), 0, 0x4440 + place);
}

// What the sum of a group is multiplied by: the fp32 number in shared memory, a byte, or nothing.
template <Code C, bool Packed>
__device__ __forceinline__ float group_scale(const DecodeArgs& a, const char* at, uint32_t byte) {
  if constexpr (C == Code::e2m1) return 1.0f;  // it is in the codes
  if constexpr (Packed && C != Code::int4) return e8m0_value(byte);
  return a.scale == nullptr ? 1.0f : *reinterpret_cast<const float*>(at);
}

// Add the sums of a group to the total, and begin anew. Two columns belong to a row.
template <int NT>
__device__ __forceinline__ void add_group(float (&part)[NT][4], const float (&scale)[2],
                                          float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[j][e] = __fmaf_rn(scale[e / 2], part[j][e], sum[j][e]);
      part[j][e] = 0.0f;
    }
  }
}

template <Code C, bool Packed, typename T, int NT>
__device__ __forceinline__ void multiply_stage(const DecodeArgs& a, const char* slot, int stage,
                                               int tile, int count, int lane,
                                               float (&sum)[Layout<C, NT>::tiles][NT][4]) {
  using L = Layout<C, NT>;
  constexpr bool in_codes = C == Code::e2m1;  // the scales are
  constexpr uint32_t flip = kMagic<T> | (Packed ? 0u : twice(8u));
  uint32_t x[L::units][NT][4];
#pragma unroll
  for (int u = 0; u < L::units; ++u) read_x<C, NT>(slot + u * L::x_unit, lane, x[u]);
#pragma unroll
  for (int i = 0; i < L::tiles; ++i) {
    if (i >= count) break;
    float part[NT][4] = {};
    uint32_t byte[2] = {8, 8};  // the zero point of symmetric int4
#pragma unroll
    for (int u = 0; u < L::units; ++u) {
      uint32_t w[2][4];
      if constexpr (Packed) {
        if (u == 0 || in_codes || (u & ((1 << a.entry_shift) - 1)) == 0) {  // another group
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half;
            byte[half] = packed_byte<C, NT>(a, slot, i, u, row, tile, stage, lane);
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = u * L::unit + (lane / 4 + 8 * half) * L::row + lane % 4 * (L::row / 4);
        Decoder<C, T>::pairs(read_codes<C>(slot + L::x_bytes + i * L::tile + at),
                             Decoder<C, T>::aid(byte[half]), flip, w[half]);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        multiply<T>(part[j], w[0][0], w[1][0], w[0][1], w[1][1], x[u][j][0], x[u][j][1]);
        multiply<T>(part[j], w[0][2], w[1][2], w[0][3], w[1][3], x[u][j][2], x[u][j][3]);
      }
      const bool last = u + 1 == L::units;
      if (!last && (in_codes || ((u + 1) & ((1 << a.entry_shift) - 1)) != 0)) continue;
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* at = slot + a.scale_at + entry_at(a, i, u, lane / 4 + 8 * half);
        scale[half] = group_scale<C, Packed>(a, at, byte[half]);
      }
      add_group<NT>(part, scale, sum[i]);
    }
  }
}

// The sum of a row times what belongs to all of it.
template <Code C, typename T>
__device__ __forceinline__ float finish(const DecodeArgs& a, float sum, int n) {
  if constexpr (C == Code::e2m1) {
    // The largest |w| over 2688, of which tiny ones would lose bits.
    const float amax = __ldg(a.last + (a.last_per_row ? n : 0));
    const float lift = amax < 1.0f ? 0x1p64f : 1.0f;
    const float factor = __fmul_rn(__fmul_rn(amax, lift), 1.0f / 2688.0f);
    const float scaled = __fmul_rn(__fmul_rn(sum, 1.0f / Decoder<C, T>::kValueUnit), factor);
    return __fmul_rn(scaled, 1.0f / lift);
  } else {
    return a.last == nullptr ? sum : __fmul_rn(sum, __ldg(a.last + (a.last_per_row ? n : 0)));
  }
}

// Add the warps' sums of `count` tiles from row `first` on in the order of the warps, and write y.
template <Code C, typename T, int NT, int Tiles, int MostWarps>
__device__ __forceinline__ void write_tiles(const DecodeArgs& a, int first, int count, int warps,
                                            int& turn, const float (&sum)[Tiles][NT][4]) {
  __shared__ float shared[2][MostWarps][8 * NT * kColumn];
  const int lane = threadIdx.x % kWarp;
  const int row = threadIdx.x % kTileRows;
  const int column = threadIdx.x / kTileRows;
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    if (i >= count) break;
    auto& of_warps = shared[turn];  // the other one may still be read
    turn ^= 1;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = 8 * j + lane % 4 * 2 + e % 2;
        of_warps[threadIdx.x / kWarp][m * kColumn + lane / 4 + e / 2 * 8] = sum[i][j][e];
      }
    }
    __syncthreads();
    const int n = first + i * kTileRows + row;
    if (column >= a.m || n >= a.n) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      total = __fadd_rn(total, of_warps[w][column * kColumn + row]);
    }
    total = finish<C, T>(a, total, n);
    if (a.bias != nullptr) {
      total = __fadd_rn(total, static_cast<float>(static_cast<const T*>(a.bias)[n]));
    }
    static_cast<T*>(a.y)[int64_t{column} * a.n + n] = static_cast<T>(total);
  }
}

template <Code C, bool Packed, typename T, int NT>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_weights(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) char ring[];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int first = static_cast<int>(int64_t{a.tiles} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{a.tiles} * (blockIdx.x + 1) / gridDim.x);
  const int all = (a.k + Layout<C, NT>::stage - 1) / Layout<C, NT>::stage;
  const int rounds = (all + kWarps - 1) / kWarps;  // stages of a warp in a pass, the last may lack
  char* mine = ring + warp * a.stages * a.stage_bytes;

  int next_tile = first, next_round = 0, next_slot = 0;
  const auto copy_next = [&] {
    const int stage = next_round * kWarps + warp;
    if (next_tile < end && stage < all) {
      copy_stage<C, Packed, T, NT>(a, mine + next_slot * a.stage_bytes, stage, next_tile,
                           min(a.pass_tiles, end - next_tile), lane);
    }
    copies_end();
    if (++next_slot == a.stages) next_slot = 0;
    if (++next_round == rounds) next_round = 0, next_tile += a.pass_tiles;
  };
  for (int i = 0; i + 1 < a.stages; ++i) copy_next();

  int slot = 0, turn = 0;
  for (int tile = first; tile < end; tile += a.pass_tiles) {
    const int count = min(a.pass_tiles, end - tile);
    float sum[Layout<C, NT>::tiles][NT][4] = {};
    for (int round = 0; round < rounds; ++round) {
      wait_copies(a.stages - 2);
      __syncwarp();  // the other lanes' copies are here, and they have read the slot that is next
      copy_next();
      const int stage = round * kWarps + warp;
      if (stage < all) {
        multiply_stage<C, Packed, T, NT>(a, mine + slot * a.stage_bytes, stage, tile, count, lane, sum);
      }
      if (++slot == a.stages) slot = 0;
    }
    write_tiles<C, T, NT, Layout<C, NT>::tiles, kWarps>(a, tile * kTileRows, count, kWarps, turn, sum);
  }
}

}  // namespace
}  // namespace ixt
