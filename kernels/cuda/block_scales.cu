// Bring the scales of a large tensor into lines: the second of two steps.
//
// A tile of 128 x 128 has a word of scales for each line of either side, 256 stores that lie apart:
// 1x128 both ran at 81 % of a copy's speed with them and at 91 % without. Side by side in a buffer
// they cost little; this transposes the buffer, which the tiles ask the L2 cache to keep for it.
#include <algorithm>

#include "blocks.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kEdge = 32;  // of a tile of words

// A word that nobody reads again: ends what store_kept asked for.
__device__ __forceinline__ uint32_t load_last(const uint32_t* from) {
  uint32_t word;
  asm volatile("{\n\t.reg .b64 p;\n\t"
               "createpolicy.fractional.L2::evict_first.b64 p, 1.0;\n\t"
               "ld.global.cg.L2::cache_hint.u32 %0, [%1], p;\n\t}"
               : "=r"(word) : "l"(from) : "memory");
  return word;
}

__global__ void __launch_bounds__(kThreads)
    spread_scales(const __grid_constant__ SpreadArgs a, uint32_t tiles_x, uint32_t first_count) {
  __shared__ uint32_t tile[kEdge][kEdge + 1];
  const int which = blockIdx.x >= first_count;
  const SpreadMatrix& m = a.matrix[which];
  const uint32_t at = blockIdx.x - (which ? first_count : 0);
  if (which) tiles_x = static_cast<uint32_t>((m.lines + kEdge - 1) / kEdge);
  const uint32_t tile_y = at / tiles_x;
  const int64_t line = int64_t{at - tile_y * tiles_x} * kEdge;
  const int64_t word = int64_t{tile_y} * kEdge;
  const int x = threadIdx.x % kEdge;
  pdl_wait();
#pragma unroll
  for (int y = threadIdx.x / kEdge; y < kEdge; y += kThreads / kEdge) {
    if (line + x < m.lines && word + y < m.words) {
      tile[y][x] = load_last(m.from + (word + y) * m.lines + line + x);
    }
  }
  __syncthreads();
#pragma unroll
  for (int y = threadIdx.x / kEdge; y < kEdge; y += kThreads / kEdge) {
    if (line + y < m.lines && word + x < m.words) {
      m.to[(line + y) * m.words + word + x] = tile[x][y];
    }
  }
}

int64_t tiles_of(int64_t n) { return (n + kEdge - 1) / kEdge; }

}  // namespace

void launch_spread_scales(const SpreadArgs& args, Target target) {
  const SpreadMatrix& one = args.matrix[0];
  const SpreadMatrix& two = args.matrix[1];
  const int64_t first = tiles_of(one.lines) * tiles_of(one.words);
  const int64_t second = tiles_of(two.lines) * tiles_of(two.words);
  if (first + second == 0) return;
  IXT_CHECK(first + second <= 0x7FFFFFFF, "`x` must have at most 2**47 elements");
  launch(spread_scales, first + second, kThreads, target.stream,
         can_overlap(target.device, spread_scales), args,
         std::max<int64_t>(1, tiles_of(one.lines)), first);
}

}  // namespace ixt
