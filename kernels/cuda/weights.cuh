// y (m, n) = x (m, k) @ W^T for m <= 16, W quantized: read once, tensor cores multiply.
//
// W is the operand with 16 rows, x the one with 8 columns (twice where m > 8). A block has a share
// of the tiles of 16 rows of W, and takes up to 2 * kTiles of them at a time ("a pass"). Its warps
// are kSplits pairs, which split K among them, stage by stage (64 bytes of a row): pair w takes the
// stages w, w + kSplits, ..., one warp of it the even tiles of the pass and the other the odd ones.
// A pair reads ahead into a ring of its own in shared memory, and meets once a stage; what the
// pairs have summed is added in their order at the end of a pass. The order of a result's sum
// depends on k and the format alone, not on m, n or the card.
//
// Codes are exact in bf16 and fp16, products are exact in fp32. The sum of a group, or of a stage
// of a longer one, or of 32 elements where a stage has several groups, starts at zero, is
// multiplied by the group's scale and added to the total. Groups of e2m1 are shorter than what an
// instruction multiplies: their scales are multiplied into the codes, which is exact as well.
#pragma once

#include "weights_copy.cuh"

namespace ixt {
namespace {

// x of a chunk: what belongs to this thread's word of codes, of each column, paired as they are.
template <Code C, int NT>
__device__ __forceinline__ void read_x(Shared mine, uint32_t (&b)[NT][Layout<C, NT>::pairs]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const Shared at = mine + 8 * j * Layout<C, NT>::x_row;
    if constexpr (Layout<C, NT>::pairs == 2) {
      const uint2 v = read8(at);
      b[j][0] = v.x, b[j][1] = v.y;
    } else {
      const uint4 v = read16(at);
      b[j][0] = __byte_perm(v.x, v.z, 0x5410), b[j][1] = __byte_perm(v.x, v.z, 0x7632);
      b[j][2] = __byte_perm(v.y, v.w, 0x5410), b[j][3] = __byte_perm(v.y, v.w, 0x7632);
    }
  }
}

// The bytes of a row's groups in a stage, the first one lowest; of e2m1, where a chunk has two, the
// one that this thread's codes belong to. `place` is where they begin in what was copied.
template <Code C>
__device__ __forceinline__ uint32_t read_bytes(Shared row, int place) {
  if constexpr (C == Code::e2m1) {
    const uint4 v = read16(row);
    const bool later = place >= 4;
    const uint32_t first = later ? v.y : v.x, second = later ? v.z : v.y;
    const uint32_t third = later ? v.w : v.z;
    const uint32_t low = __funnelshift_r(first, second, 8 * (place & 3));
    const uint32_t high = __funnelshift_r(second, third, 8 * (place & 3));
    return __byte_perm(low, high, threadIdx.x & 2 ? 0x7531 : 0x6420);
  } else {
    const uint2 v = read8(row);
    return __funnelshift_r(v.x, v.y, 8 * place);
  }
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

// What this thread reads of a stage: where its part of its warp's first tile is. The next one is
// two tiles further.
struct View {
  Shared x, codes[2], scales, packed;  // codes: of the first two chunks, of the other two
  int row;        // of the codes: this one, and eight further
  int first;      // group of a row
  uint32_t keep;  // of read_bytes(): the others are behind the end of k, and another row's
};

template <Code C, int NT>
__device__ __forceinline__ View view_of(const DecodeArgs& a, Shared slot, int stage, int tile,
                                        int side, int scales_bytes) {
  using L = Layout<C, NT>;
  const int lane = threadIdx.x % kWarp;
  const int row = lane / 4;
  const int first = stage * L::stage >> a.group_shift;
  // A byte of an e2m1 thread's is one of two. Zero points may be any: their codes are zero.
  const int lack = max(0, (C == Code::e2m1 ? 8 : 2) - (a.groups - first));
  const uint32_t keep = C == Code::e2m1 ? 0xFFFFFFFFu >> 4 * lack : 0xFFFFu >> 8 * lack;
  const Shared codes = slot + L::x_bytes + side * L::tile;
  return {slot + row * L::x_row + lane % 4 * (L::x_row / 4),
          {codes + chunk_at(lane / 16, lane % 16), codes + chunk_at(2 + lane / 16, lane % 16)},
          slot + a.scale_at + side * scales_bytes + 4 * row,
          slot + a.packed_at + (side * kTileRows + row) * 2 * L::word,
          (tile + side) * kTileRows + row,
          first,
          C == Code::int4 ? 0xFFFFFFFFu : keep};
}

// The bytes of the two rows of this thread, of its warp's tile `i`.
template <Code C, int NT>
__device__ __forceinline__ void tile_bytes(const DecodeArgs& a, const View& v, int i,
                                           uint32_t (&bytes)[2]) {
  constexpr int word = Layout<C, NT>::word;
  const Shared rows = v.packed + i * 2 * kTileRows * 2 * word;
  const int group = ((v.row + i * 2 * kTileRows) >> a.row_shift) * a.groups + v.first;
  // Eight rows further it is the same: a block of rows has them both, or it is 8 * a.groups more.
  const int place = group & (word - 1);
  bytes[0] = read_bytes<C>(rows, place) & v.keep;
  bytes[1] = read_bytes<C>(rows + 8 * 2 * word, place) & v.keep;
}

// The scales of group `u` of a stage, of both rows.
template <Code C, bool Packed>
__device__ __forceinline__ void group_scales(const DecodeArgs& a, const View& v, int i, int u,
                                             const uint32_t (&bytes)[2], float (&scale)[2]) {
  scale[0] = scale[1] = 1.0f;
  if constexpr (C == Code::e2m1) return;  // they are in the codes
  if constexpr (Packed && C != Code::int4) {
    for (int half = 0; half < 2; ++half) {
      scale[half] = e8m0_value(__byte_perm(bytes[half], 0, 0x4440 + u));
    }
  } else if (a.scale != nullptr) {
    const Shared from = v.scales + (i * a.entries + u) * kTileRows * 4;
    scale[0] = __uint_as_float(read4(from));
    scale[1] = __uint_as_float(read4(from + 8 * 4));
  }
}

// Multiply this warp's tile `i`. Whole: its stage is of one group, else of a.entries.
template <Code C, bool Packed, bool Whole, typename T, int NT>
__device__ __forceinline__ void multiply_tile(
    const DecodeArgs& a, const View& v, int i,
    const uint32_t (&x)[kChunks][NT][Layout<C, NT>::pairs], float (&sum)[NT][4]) {
  using L = Layout<C, NT>;
  constexpr uint32_t flip = kMagic<T> | (Packed ? 0u : twice(8u));
  constexpr int unit = kUnit / L::chunk_k;  // chunks
  uint32_t codes[2][4];  // of two chunks: the first one's two rows, the second one's
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    read_matrices(v.codes[pair] + 2 * i * L::tile, codes[pair]);
  }
  uint32_t bytes[2] = {};
  if constexpr (Packed) tile_bytes<C, NT>(a, v, i, bytes);
  uint32_t aid[2][kChunks];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (C == Code::e2m1) {
      Decoder<C, T>::aids(bytes[half], aid[half]);
    } else if constexpr (C == Code::int4) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int u = Whole ? 0 : c >> a.entry_shift;
        aid[half][c] = Decoder<C, T>::aid(Packed ? __byte_perm(bytes[half], 0, 0x4440 + u) : 8);
      }
    }
  }
  float part[NT][4] = {};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint32_t w[2][L::pairs];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Decoder<C, T>::pairs(codes[c / 2][c % 2 * 2 + half], aid[half][c], flip, w[half]);
    }
#pragma unroll
    for (int p = 0; p < L::pairs; p += 2) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        multiply<T>(part[j], w[0][p], w[1][p], w[0][p + 1], w[1][p + 1], x[c][j][p],
                    x[c][j][p + 1]);
      }
    }
    if (c + 1 == kChunks || (!Whole && (c + 1) % unit == 0)) {
      // Those of e8m0 are of 32 elements.
      const bool every = Packed && C != Code::int4;
      float scale[2];
      group_scales<C, Packed>(a, v, i, Whole ? 0 : every ? c / unit : c / unit >> a.entry_shift,
                              bytes, scale);
      add_group<NT>(part, scale, sum);
    }
  }
}

template <Code C, bool Packed, bool Whole, typename T, int NT>
__device__ __forceinline__ void multiply_stage(const DecodeArgs& a, const View& v, int tiles,
                                               float (&sum)[kTiles][NT][4]) {
  using L = Layout<C, NT>;
  uint32_t x[kChunks][NT][L::pairs];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) read_x<C, NT>(v.x + c * L::x_chunk, x[c]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i >= tiles) break;
    multiply_tile<C, Packed, Whole, T, NT>(a, v, i, x, sum[i]);
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

// Add the pairs' sums of `count` tiles in the order of the pairs, and write y. The warps of a side
// write the tiles that they have summed.
template <Code C, typename T, int NT>
__device__ __forceinline__ void write_tiles(const DecodeArgs& a, int tile, int count, int side,
                                            const float (&sum)[kTiles][NT][4]) {
  __shared__ float shared[2][kSplits][8 * NT * kColumn];
  const int lane = threadIdx.x % kWarp;
  const int row = threadIdx.x % kTileRows;
  const int column = threadIdx.x / kTileRows % kMostRows;
  auto& mine = shared[side][threadIdx.x / kWarp % kSplits];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (2 * i >= count) break;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = 8 * j + lane % 4 * 2 + e % 2;
        mine[m * kColumn + lane / 4 + e / 2 * 8] = sum[i][j][e];
      }
    }
    __syncthreads();
    const int n = (tile + 2 * i + side) * kTileRows + row;
    if (2 * i + side < count && column < a.m && n < a.n) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kSplits; ++w) {
        total = __fadd_rn(total, shared[side][w][column * kColumn + row]);
      }
      total = finish<C, T>(a, total, n);
      if (a.bias != nullptr) {
        total = __fadd_rn(total, static_cast<float>(static_cast<const T*>(a.bias)[n]));
      }
      static_cast<T*>(a.y)[int64_t{column} * a.n + n] = static_cast<T>(total);
    }
    __syncthreads();  // before the next tiles' sums replace these
  }
}

template <Code C, bool Packed, typename T, int NT>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_weights(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) char ring[];
  const int split = threadIdx.x / kWarp % kSplits;
  const int side = threadIdx.x / (kWarp * kSplits);  // the warps of a pair are on one scheduler
  const int block = blockIdx.x, blocks = gridDim.x;  // the first ones have a tile more
  const int first = a.tiles / blocks * block + min(a.tiles % blocks, block);
  const int end = first + a.tiles / blocks + (block < a.tiles % blocks);
  Feed<C, Packed, T, NT> feed(a, shared_address(ring), split, side, first, end);
  const int scales_bytes = feed.scales_of(a);
  for (int tile = first; tile < end; tile += a.pass_tiles) {
    const int count = min(a.pass_tiles, end - tile);
    const int tiles = (count - side + 1) / 2;  // of this warp
    float sum[kTiles][NT][4] = {};
    // A pair's stages, of which the last may lack; before the first ones, the ring is filled.
    int stage = split - (tile == first ? (a.stages - 1) * kSplits : 0);
#pragma unroll 1
    for (; stage - split < feed.all; stage += kSplits) {
      __syncwarp();  // lanes go different ways where they copy; what follows takes whole warps
      if (stage >= 0) {
        wait_copies(a.stages - 2);
        meet(1 + split, 2 * kWarp);  // the pair's copies are here, and it has read the next slot
      }
      feed.copy_next();
      if (stage < 0 || stage >= feed.all) continue;
      __syncwarp();
      // What is copied after the next one goes where this stage is.
      const View v = view_of<C, NT>(a, feed.slot, stage, tile, side, scales_bytes);
      // Bytes of e8m0 are for groups of 32, those of e2m1 are in the codes.
      if (C == Code::e2m1 || (!(Packed && C != Code::int4) && a.entries == 1)) {
        multiply_stage<C, Packed, true, T, NT>(a, v, tiles, sum);
      } else if constexpr (C != Code::e2m1) {
        multiply_stage<C, Packed, false, T, NT>(a, v, tiles, sum);
      }
    }
    write_tiles<C, T, NT>(a, tile, count, side, sum);
  }
}

}  // namespace
}  // namespace ixt
