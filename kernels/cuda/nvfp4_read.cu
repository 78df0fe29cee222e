// What reads only: the amax of a Hadamard transform, and dequantize.
#include "nvfp4_device.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kAmaxUnroll = 4;

// ----------------------------------------------------------------------------- amax_hadamard

// Elements of a block that lies along a row, or along a column of x.
template <typename T, bool Columns>
__device__ __forceinline__ Block16<T> block_at(const Fp4Source& x, uint32_t row, uint32_t col) {
  Block16<T> block;
  if constexpr (!Columns) {
    block.load(static_cast<const T*>(x.x) + row * x.stride + col * kFp4Block, x.wide);
  } else {
    const T* p = static_cast<const T*>(x.x) + row * kFp4Block * x.stride + col;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        block.word[i] = __ldg(reinterpret_cast<const uint32_t*>(p + i * x.stride));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint16_t low = __ldg(reinterpret_cast<const uint16_t*>(p + 2 * i * x.stride));
        const uint16_t high = __ldg(reinterpret_cast<const uint16_t*>(p + (2 * i + 1) * x.stride));
        block.word[i] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  }
  return block;
}

// Max over all blocks, in `amax`, which starts at 0: bits of such floats order like integers.
template <typename T, bool Columns>
__global__ void __launch_bounds__(kThreads)
    fp4_amax(const __grid_constant__ Fp4Source x, uint32_t width, uint64_t count,
             const __grid_constant__ Divider by_width, float* amax) {
  __shared__ float shared[kWarp];
  float best = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kAmaxUnroll; ++i) {
    const uint64_t at = (uint64_t{blockIdx.x} * kAmaxUnroll + i) * kThreads + threadIdx.x;
    if (at >= count) break;
    const uint32_t row = by_width(at);
    const uint32_t col = static_cast<uint32_t>(at) - row * width;
    best = fmaxf(best, hadamard(block_at<T, Columns>(x, row, col)).amax());
  }
  const int value = __float_as_int(block_max(best, shared));
  auto* target = reinterpret_cast<int*>(amax);
  if (threadIdx.x != 0) return;
  pdl_wait();  // it is zero
  if (value > *static_cast<volatile int*>(target)) atomicMax(target, value);
}

// -------------------------------------------------------------------------------- dequantize

// 256 threads were slower by 1.5 %, four words each by 1 %.
constexpr int kLineThreads = 512;
constexpr int kWordUnroll = 2;  // words of eight codes a thread

// The fp16 value of each code has a lower byte of zero; this is the upper one, without the sign.
constexpr uint32_t kUpperLow = 0x3E3C3800u;   // 0, 0.5, 1, 1.5
constexpr uint32_t kUpperHigh = 0x46444240u;  // 2, 3, 4, 6

// Eight values, times the factor.
template <typename T>
__device__ __forceinline__ void decode8(uint32_t codes, float factor, Raw<16> (&out)[sizeof(T) / 2]) {
  uint32_t words[2 * sizeof(T)];
  float v[8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = codes >> (16 * half);
    const uint32_t upper = __byte_perm(kUpperLow, kUpperHigh, four & 0x7777u);
    // signs of the four codes, to the top bit of their bytes
    const uint32_t spread = __byte_perm(four << 4, four, 0x5140);
    const uint32_t bytes = upper | (spread & 0x80808080u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = __byte_perm(bytes, 0, i == 0 ? 0x1404 : 0x3424);
      const float2 values = __half22float2(bit_copy<__half2>(pair));
      v[4 * half + 2 * i] = __fmul_rn(values.x, factor);
      v[4 * half + 2 * i + 1] = __fmul_rn(values.y, factor);
    }
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i) {
    words[i] = sizeof(T) == 4 ? __float_as_uint(v[i % 8]) : pack_pair<T>(v[2 * i % 8], v[(2 * i + 1) % 8]);
  }
  memcpy(out, words, sizeof(words));
}

template <typename T>
__device__ __forceinline__ void store8(T* y, uint64_t at, uint32_t codes, uint32_t scale,
                                       float amax) {
  Raw<16> out[sizeof(T) / 2];
  decode8<T>(codes, fp4_factor(decode_pair<E4M3>(scale).x, amax), out);
  auto* target = reinterpret_cast<Raw<16>*>(y) + at * (sizeof(T) / 2);
#pragma unroll
  for (int j = 0; j < static_cast<int>(sizeof(T) / 2); ++j) target[j] = out[j];
}

// Scales that lie like the codes, a byte for two words: all of it is one long row.
template <typename T>
__global__ void __launch_bounds__(kLineThreads)
    fp4_dequantize_line(const __grid_constant__ Fp4Result q, T* __restrict__ y, uint64_t words,
                        const __grid_constant__ Divider by_width) {
  uint32_t codes[kWordUnroll];
  uint32_t scales[kWordUnroll];
  float amax[kWordUnroll];
  const uint64_t first = uint64_t{blockIdx.x} * (kLineThreads * kWordUnroll) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWordUnroll; ++i) {  // all loads before the first use
    const uint64_t at = first + i * kLineThreads;
    if (at >= words) continue;
    codes[i] = __ldg(reinterpret_cast<const uint32_t*>(q.codes) + at);
    scales[i] = __ldg(q.scales + at / 2);
    amax[i] = __ldg(q.amax + (q.amax_per_row ? by_width(at / 2) : 0));
  }
#pragma unroll
  for (int i = 0; i < kWordUnroll; ++i) {
    const uint64_t at = first + i * kLineThreads;
    if (at < words) store8(y, at, codes[i], scales[i], amax[i]);
  }
}

// Scales of squares, or in the GEMM's order: a thread takes a word in each of two rows. In the
// GEMM's order these are 32 apart, and their scales are in 8 bytes.
constexpr int kRows = 2;
constexpr int kWarps = kThreads / kWarp;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    fp4_dequantize_rows(const __grid_constant__ Fp4Result q, T* __restrict__ y, uint32_t tiles,
                        uint32_t warps_across) {
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t tile_row = blockIdx.x / tiles;
  const uint32_t tile = blockIdx.x - tile_row * tiles;
  const uint32_t word = (tile * warps_across + warp % warps_across) * kWarp + threadIdx.x % kWarp;
  const uint32_t group = tile_row * (kWarps / warps_across) + warp / warps_across;
  constexpr uint32_t high = 32 * kRows;
  const uint32_t first = q.gemm ? group / 32 * high + group % 32 : group * kRows;
  const uint32_t step = q.gemm ? 32 : 1;
  const uint32_t col = word / 2;
  if (first >= q.rows || col >= q.blocks) return;
  uint32_t codes[kRows];
  uint32_t scales[kRows];
  float amax[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * step;
    if (row >= q.rows) continue;
    codes[i] = __ldg(reinterpret_cast<const uint32_t*>(q.codes) + 2 * q.index(row, 0) + word);
    amax[i] = __ldg(q.amax + (q.amax_per_row ? row : 0));
  }
  if (q.gemm) {
    const Raw<4 * kRows> words = __ldg(
        reinterpret_cast<const Raw<4 * kRows>*>(q.scales + q.scale_index(first, col & ~3u)));
    memcpy(scales, &words, sizeof(scales));
#pragma unroll
    for (int i = 0; i < kRows; ++i) scales[i] = scales[i] >> (8 * (col & 3)) & 0xFFu;
  } else {
    const uint32_t scale = __ldg(q.scales + q.index(first / 16, col));
#pragma unroll
    for (int i = 0; i < kRows; ++i) scales[i] = scale;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * step;
    if (row < q.rows) {
      store8(y, 2 * q.index(row, 0) + word, codes[i], scales[i], amax[i]);
    }
  }
}

template <typename T>
void dequantize_line(const Fp4Result& q, T* y, cudaStream_t stream) {
  const uint64_t words = uint64_t{q.rows} * q.blocks * 2;
  const int64_t tile = int64_t{kLineThreads} * kWordUnroll;
  launch(fp4_dequantize_line<T>, (static_cast<int64_t>(words) + tile - 1) / tile, kLineThreads,
         stream, false, q, y, words, Divider(q.blocks, static_cast<int64_t>(words / 2)));
}

template <typename T>
void dequantize_rows(const Fp4Result& q, T* y, cudaStream_t stream) {
  const int64_t words = int64_t{q.blocks} * 2;
  constexpr int high = 32 * kRows;
  const int64_t groups =
      q.gemm ? (int64_t{q.rows} + high - 1) / high * 32 : (int64_t{q.rows} + kRows - 1) / kRows;
  int across = 1;
  while (across < kWarps && across * kWarp < words) across *= 2;
  const int64_t tiles = (words + across * kWarp - 1) / (across * kWarp);
  const int64_t down = kWarps / across;
  launch(fp4_dequantize_rows<T>, tiles * ((groups + down - 1) / down), kThreads, stream, false, q,
         y, static_cast<uint32_t>(tiles), static_cast<uint32_t>(across));
}

int64_t grid_for(uint64_t units, int per_thread) {
  const int64_t tile = int64_t{kThreads} * per_thread;
  return (static_cast<int64_t>(units) + tile - 1) / tile;
}

}  // namespace

void launch_fp4_amax(const Fp4Source& x, bool columns, float* amax, Float in, Target target) {
  launch_clear(amax, 1, target);
  const int64_t width = columns ? x.cols : x.cols / kFp4Block;
  const int64_t count = columns ? x.rows / kFp4Block * width : x.rows * width;
  if (count == 0) return;
  const int64_t grid = grid_for(count, kAmaxUnroll);
  const Divider by_width(width, count);
  with_float<bf16, f16>(in, [&](auto t) {
    using T = decltype(t);
    const auto kernel = columns ? fp4_amax<T, true> : fp4_amax<T, false>;
    launch(kernel, grid, kThreads, target.stream, can_overlap(target.device, kernel), x,
           static_cast<uint32_t>(width), static_cast<uint64_t>(count), by_width, amax);
  });
}

void launch_fp4_dequantize(const Fp4Result& q, bool square, void* y, Float out,
                           cudaStream_t stream) {
  if (q.rows == 0 || q.blocks == 0) return;
  with_float<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    if (square || q.gemm) {
      dequantize_rows(q, static_cast<T*>(y), stream);
    } else {
      dequantize_line(q, static_cast<T*>(y), stream);
    }
  });
}

}  // namespace ixt
