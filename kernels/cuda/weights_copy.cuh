// What a stage of the kernel of weights.cuh needs, on its way into shared memory.
#pragma once

#include "../common/mxfp8.h"
#include "weight_codes.cuh"

namespace ixt {
namespace {

constexpr int kSplits = 8;  // pairs of warps, which split K
constexpr int kThreads = 2 * kSplits * kWarp;
constexpr int kTiles = 4;   // of a warp in a pass, at most
constexpr int kChunks = 4;  // of 16 bytes, of a row in a stage
constexpr int kStageBytes = 16 * kChunks;
constexpr int kChunk = kTileRows * 16;  // bytes of a tile's
constexpr int kUnit = 32;   // elements of k, the smallest group that a scale multiplies
constexpr int kMostStages = 4;
constexpr int kColumn = 20;  // floats from a column of a tile's sums to the next

// Where things lie in a stage: x by chunks and rows, then the codes by tiles, chunks and rows, then
// the scales.
template <Code C, int NT>
struct Layout {
  static constexpr int bits = Decoder<C, bf16>::bits;
  static constexpr int stage = kChunks * 128 / bits;  // elements of k
  static constexpr int chunk_k = 128 / bits;
  static constexpr int pairs = 16 / bits;  // of a word of codes
  static constexpr int x_row = 2 * chunk_k;
  static constexpr int x_chunk = 8 * NT * x_row + x_row;
  static constexpr int x_bytes = kChunks * x_chunk;
  static constexpr int tile = kChunks * kChunk;
  // Bytes of groups come as two aligned words around the ones that a row has in a stage.
  static constexpr int word = C == Code::e2m1 ? 8 : 4;
};

// Where a row's chunk is in a tile: chunks of a row on other banks, and rows of a chunk as well.
__device__ __forceinline__ int chunk_at(int chunk, int row) {
  return chunk * kChunk + (row ^ 2 * chunk) * 16;
}

// A word of which the first `bytes` exist, if not all; the others are zero. The last ones of an
// array come by themselves: a copy of a part of a word touches all of it. Who reads them has a
// barrier before, as for copies.
template <int Word>
__device__ __forceinline__ void write_part(Shared to, const uint8_t* global, int bytes) {
  if (bytes >= Word) return;
#pragma unroll 1
  for (int i = 0; i < Word; ++i) write_byte(to + i, i < bytes ? __ldg(global + i) : 0);
}

// What a thread of a pair copies, and where it is: the stages of a pass in turn, pass by pass. Of x
// the pair's threads share a stage, of the weight a warp has its own tiles.
template <Code C, bool Packed, typename T, int NT>
struct Feed {
  using L = Layout<C, NT>;
  static constexpr int kXChunks = L::stage / 8;  // of 8 numbers, of a row; a thread has one of some
  static constexpr int kXRows = 2 * kWarp / kXChunks;  // rows, these apart

  const DecodeArgs& a;
  const int split, side, lane;
  const int end;           // of the block's tiles
  const int pitch;         // bytes of a row of codes
  const int x_row, x_k;    // this thread's first row of x, and its place in a stage
  const int all;           // stages, and how many have something of x and of codes for this thread
  const int x_stages, code_stages;
  const int x_to, codes_to, scales_to;  // in a stage
  const Shared ring, ring_end;  // the pair's
  Shared slot;             // of the next stage
  int stage;
  int tile, count;         // of the pass
  int rows;                // of the pass's codes, from this thread's first one on
  const char* x;           // of this thread, in that stage
  const uint8_t* codes;

  __device__ __forceinline__ Feed(const DecodeArgs& args, Shared base, int of_split, int of_side,
                                  int first, int last)
      : a(args), split(of_split), side(of_side), lane(threadIdx.x % kWarp), end(last),
        pitch(a.k / 8 * L::bits), x_row((side * kWarp + lane) / kXChunks),
        x_k(lane % kXChunks * 8), all((a.k + L::stage - 1) / L::stage),
        x_stages(kept((a.k - x_k + L::stage - 1) / L::stage)),
        code_stages(kept((pitch - lane % 4 * 16 + kStageBytes - 1) / kStageBytes)),
        x_to(kept(x_k / L::chunk_k * L::x_chunk + x_row * L::x_row + x_k % L::chunk_k * 2)),
        codes_to(kept(L::x_bytes + side * L::tile + chunk_at(lane % 4, lane / 4))),
        scales_to(a.scale_at + side * scales_of(a) + 4 * lane),
        ring(base + split * a.stages * a.stage_bytes), ring_end(ring + a.stages * a.stage_bytes),
        slot(ring) {
    begin_pass(first);
  }

  // Bytes of the scales of a warp's tiles: by tiles, groups of a row and rows.
  static __device__ __forceinline__ int scales_of(const DecodeArgs& a) {
    return (a.pass_tiles + 1) / 2 * a.entries * kTileRows * 4;
  }

  __device__ __forceinline__ void begin_pass(int at) {
    tile = at;
    stage = split;
    count = min(a.pass_tiles, end - tile);
    const int row = (tile + side) * kTileRows + lane / 4;
    rows = min(a.n, (tile + count) * kTileRows) - row;
    x = static_cast<const char*>(a.x) + 2 * (int64_t{x_row} * a.k + stage * L::stage + x_k);
    codes = a.codes + int64_t{row} * pitch + stage * kStageBytes + lane % 4 * 16;
  }

  __device__ __forceinline__ void copy_x() const {
    const char* from = x;
#pragma unroll
    for (int r = 0; r < 8 * NT; r += kXRows, from += 2 * int64_t{kXRows} * a.k) {
      if (x_row + r < a.m) copy16(slot + x_to + r * L::x_row, from, stage < x_stages);
    }
  }

  // Rows behind n are left out, and what lies behind k is zero.
  __device__ __forceinline__ void copy_codes() const {
    const uint8_t* from = codes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i % 2 == 0 && 2 * i >= count) break;
#pragma unroll
      for (int half = 0; half < 2; ++half, from += (half == 1 ? 8 : 24) * int64_t{pitch}) {
        const int row = 2 * i * kTileRows + 8 * half;
        const Shared to = slot + codes_to + 2 * i * L::tile + 8 * half * 16;
        if (row < rows) copy16(to, from, stage < code_stages);
      }
    }
  }

  // Where the group `group` of row `row` of tile `i` of the pass is; of the last row behind n.
  __device__ __forceinline__ int group_index(int i, int row, int group) const {
    return (min((tile + i) * kTileRows + row, a.n - 1) >> a.row_shift) * a.groups + group;
  }

  // Half a warp copies those of a tile's rows; groups behind the end of k take the last one's.
  __device__ __forceinline__ void copy_scales() const {
    const int first = stage * L::stage >> a.group_shift;
    const int last = (count - side + 1) / 2 * a.entries;
    Shared to = slot + scales_to;
#pragma unroll 1
    for (int i = lane / kTileRows; i < last; i += kWarp / kTileRows, to += kWarp * 4) {
      const int group = min(first + (i & (a.entries - 1)), a.groups - 1);
      const int at = group_index(2 * (i >> a.entries_shift) + side, lane % kTileRows, group);
      copy_small<4>(to, a.scale + at);
    }
  }

  __device__ __forceinline__ void copy_packed() const {
    const int first = stage * L::stage >> a.group_shift;
    const Shared to = slot + a.packed_at + (side * kWarp + lane) * L::word;
    const auto word_of = [&](int i) {
      const int group = group_index(2 * i + side, lane / 2, first);
      return (group & ~(L::word - 1)) + lane % 2 * L::word;
    };
    bool part = false;  // where the array ends
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (2 * i + side >= count) break;
      const int at = word_of(i);
      const bool whole = at + L::word <= a.packed_bytes;
      if (whole) copy_small<L::word>(to + 2 * i * kWarp * L::word, a.packed + at);
      part |= !whole;
    }
    if (!part) return;
#pragma unroll 1
    for (int i = 0; 2 * i + side < count; ++i) {
      const int at = word_of(i);
      write_part<L::word>(to + 2 * i * kWarp * L::word, a.packed + at, a.packed_bytes - at);
    }
  }

  // Begin to copy the next stage, if there is one, and turn to the one after it.
  __device__ __forceinline__ void copy_next() {
    if (tile < end && stage < all) {
      copy_x();
      copy_codes();
      if (a.scale != nullptr) copy_scales();
      if constexpr (Packed) copy_packed();
    }
    copies_end();
    slot += a.stage_bytes;
    if (slot == ring_end) slot = ring;
    stage += kSplits, x += 2 * kSplits * L::stage, codes += kSplits * kStageBytes;
    if (stage - split >= all) begin_pass(tile + a.pass_tiles);
  }
};

}  // namespace
}  // namespace ixt
