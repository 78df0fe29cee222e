// A tile of 128 rows in registers: how threads share it, amax of its rows and columns, its codes.
//
// A thread owns a patch of 8 x 8 elements, so most of a column's amax, and the four bytes of a word
// of either orientation, are found in its own registers. A warp owns 32 rows x 64 columns, four
// patches by eight: the amax of 32 elements, along rows or columns, is an exchange of four lanes.
#pragma once

#include "blocks.h"
#include "fp8_device.cuh"

namespace ixt {

constexpr int kTileRows = 128;
constexpr int kPatch = 8;
constexpr int kGroup = 32;      // elements of the smallest block
constexpr int kLineBytes = 128;  // of codes staged in shared memory

// Larger magnitude of each number in a word, NaN ignored; the sign of the result means nothing.
template <typename T>
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (sizeof(T) == 4) {
    r = __float_as_uint(fmaxf(fabsf(__uint_as_float(a)), fabsf(__uint_as_float(b))));
  } else if constexpr (std::is_same_v<T, bf16>) {
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & kPairMagnitude), "r"(b & kPairMagnitude));
#endif
  } else {
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a & kPairMagnitude), "r"(b & kPairMagnitude));
#endif
  }
  return r;
}

// The magnitudes in a word; 0 where the word is the maximum of nothing but NaN.
template <typename T>
__device__ __forceinline__ float2 magnitudes(uint32_t word) {
  float v[2] = {0.0f, 0.0f};
  unpack<T>(word, v);
  return {fmaxf(fabsf(v[0]), 0.0f), fmaxf(fabsf(v[1]), 0.0f)};
}

template <typename T>
__device__ __forceinline__ float magnitude(uint32_t word) {
  const float2 both = magnitudes<T>(word);
  return fmaxf(both.x, both.y);
}

// Two lanes that differ in `bit` share N maxima: the lane without it keeps the first half.
template <typename T, int N>
__device__ __forceinline__ void halve(uint32_t (&v)[N], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t mine = upper ? v[i + N / 2] : v[i];
    const uint32_t other = upper ? v[i] : v[i + N / 2];
    v[i] = max_magnitude<T>(mine, __shfl_xor_sync(0xFFFFFFFFu, other, bit));
  }
}

// Maxima of 8 lines over four lanes, `bit` and 2 * `bit` apart; each lane is left with two lines.
template <typename T, int N>
__device__ __forceinline__ float2 share_lines(uint32_t (&v)[N], int lane, int bit) {
  halve<T>(v, lane, 2 * bit);
  uint32_t half[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) half[i] = v[i];
  halve<T>(half, lane, bit);
  if constexpr (sizeof(T) == 4) return {magnitude<T>(half[0]), magnitude<T>(half[1])};
  return magnitudes<T>(half[0]);
}

// Which rows and columns of the tile are this thread's.
struct PatchPlace {
  int lane;
  int row;  // first of its 8 rows
  int col;
  __device__ __forceinline__ PatchPlace() {
    lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    row = warp % 4 * 32 + lane / 8 * kPatch;
    col = warp / 4 * 64 + lane % 8 * kPatch;
  }
};

template <typename T>
struct Patch {
  static constexpr int W = kPatch * sizeof(T) / 4;  // words of a row
  uint32_t word[kPatch][W];

  // `x` points at the patch, of which `rows` x `cols` exist; what does not reads as zero. `wide`:
  // every row is aligned to 16 bytes and has either all of its 8 elements or none.
  __device__ __forceinline__ void load(const T* __restrict__ x, int64_t stride, int rows, int cols,
                                       bool wide) {
    if (wide) {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        const auto* source = reinterpret_cast<const uint4*>(x + i * stride);
        const bool here = i < rows && cols > 0;
#pragma unroll
        for (int w = 0; w < W; w += 4) {
          const uint4 v = here ? __ldg(source + w / 4) : uint4{0u, 0u, 0u, 0u};
          word[i][w] = v.x, word[i][w + 1] = v.y, word[i][w + 2] = v.z, word[i][w + 3] = v.w;
        }
      }
      return;
    }
    constexpr int per_word = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const auto* source = reinterpret_cast<const Raw<sizeof(T)>*>(x + i * stride);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        word[i][w] = 0;
#pragma unroll
        for (int j = 0; j < per_word; ++j) {
          const int c = w * per_word + j;
          if (i < rows && c < cols) {
            word[i][w] |= static_cast<uint32_t>(__ldg(source + c)) << (16 * j);
          }
        }
      }
    }
  }

  // Elements (i, 2 * pair) and (i, 2 * pair + 1).
  __device__ __forceinline__ float2 pair(int i, int pair) const {
    float v[2];
    if constexpr (sizeof(T) == 4) {
      v[0] = __uint_as_float(word[i][2 * pair]);
      v[1] = __uint_as_float(word[i][2 * pair + 1]);
    } else {
      unpack<T>(word[i][pair], v);
    }
    return {v[0], v[1]};
  }

  // amax of two rows over 32 columns: rows 2q and 2q + 1 of the patch, q = lane % 4.
  __device__ __forceinline__ float2 row_amax(int lane) const {
    uint32_t row[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      row[i] = max_magnitude<T>(word[i][0], word[i][1]);
#pragma unroll
      for (int w = 2; w < W; w += 2) {
        row[i] = max_magnitude<T>(row[i], max_magnitude<T>(word[i][w], word[i][w + 1]));
      }
    }
    if constexpr (sizeof(T) == 4) {
      return share_lines<T>(row, lane, 1);
    } else {
      uint32_t both[kPatch / 2];  // two rows a word
#pragma unroll
      for (int i = 0; i < kPatch / 2; ++i) {
        const uint32_t low = __byte_perm(row[2 * i], row[2 * i + 1], 0x5410);
        const uint32_t high = __byte_perm(row[2 * i], row[2 * i + 1], 0x7632);
        both[i] = max_magnitude<T>(low, high);
      }
      return share_lines<T>(both, lane, 1);
    }
  }

  // amax of two columns over 32 rows: columns 2q and 2q + 1 of the patch, q = lane / 8.
  __device__ __forceinline__ float2 column_amax(int lane) const {
    uint32_t column[W];
#pragma unroll
    for (int w = 0; w < W; ++w) {
      column[w] = max_magnitude<T>(word[0][w], word[1][w]);
#pragma unroll
      for (int i = 2; i < kPatch; ++i) column[w] = max_magnitude<T>(column[w], word[i][w]);
    }
    return share_lines<T>(column, lane, 8);
  }

  // amax of the patch, as a word.
  __device__ __forceinline__ uint32_t amax() const {
    uint32_t best[W];
#pragma unroll
    for (int w = 0; w < W; ++w) {
      best[w] = max_magnitude<T>(word[0][w], word[1][w]);
#pragma unroll
      for (int i = 2; i < kPatch; ++i) best[w] = max_magnitude<T>(best[w], word[i][w]);
    }
#pragma unroll
    for (int w = 1; w < W; ++w) best[0] = max_magnitude<T>(best[0], best[w]);
    return best[0];
  }
};

// Byte of code `at` of line `line` in the staged tile: 16-byte chunks are permuted, so that neither
// the patches' 8-byte writes nor the lines' 16-byte reads meet in a bank.
__device__ __forceinline__ int staged(int line, int at) {
  return line * kLineBytes + (((at >> 4) ^ (line >> 3 & 7)) << 4) + (at & 15);
}

// Write `lines` lines of `width` codes each to rows of `pitch` bytes. `wide`: 16 bytes at a time.
__device__ __forceinline__ void copy_staged(const uint8_t* tile, uint8_t* __restrict__ out,
                                            int64_t pitch, int lines, int width, bool wide) {
  if (wide) {
    const int chunk = threadIdx.x % 8 * 16;
    const int step = blockDim.x / 8;
    if (chunk >= width) return;
#pragma unroll 4
    for (int line = threadIdx.x / 8; line < lines; line += step) {
      *reinterpret_cast<uint4*>(out + line * pitch + chunk) =
          *reinterpret_cast<const uint4*>(tile + staged(line, chunk));
    }
    return;
  }
  const int at = threadIdx.x % kLineBytes;
  if (at >= width) return;
  for (int line = threadIdx.x / kLineBytes; line < lines; line += blockDim.x / kLineBytes) {
    out[line * pitch + at] = tile[staged(line, at)];
  }
}

template <typename Format>
__device__ __forceinline__ uint32_t encode_quad(float a, float b, float c, float d) {
  return encode_pair<Format>(a, b) | encode_pair<Format>(c, d) << 16;
}

}  // namespace ixt
