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
  if (threadIdx.x == 0 && value > *static_cast<volatile int*>(target)) atomicMax(target, value);
}

// -------------------------------------------------------------------------------- dequantize

constexpr int kWordUnroll = 4;  // words of eight codes a thread

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

template <typename T, bool Square>
__global__ void __launch_bounds__(kThreads)
    fp4_dequantize(const __grid_constant__ Fp4Result q, T* y, uint64_t words,
                   const __grid_constant__ Divider by_width) {
  uint32_t codes[kWordUnroll];
  const uint64_t first = uint64_t{blockIdx.x} * (kThreads * kWordUnroll) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWordUnroll; ++i) {
    const uint64_t at = first + i * kThreads;
    codes[i] = at < words ? __ldg(reinterpret_cast<const uint32_t*>(q.codes) + at) : 0;
  }
  const float whole = q.amax_per_row ? 0.0f : __ldg(q.amax);
#pragma unroll
  for (int i = 0; i < kWordUnroll; ++i) {
    const uint64_t at = first + i * kThreads;
    if (at >= words) return;
    const uint32_t row = by_width(at / 2);
    const uint32_t col = static_cast<uint32_t>(at / 2) - row * q.blocks;
    const uint64_t place = q.scale_index(Square && !q.gemm ? row / 16 : row, col);
    const float scale = decode_pair<E4M3>(__ldg(q.scales + place)).x;
    const float amax = q.amax_per_row ? __ldg(q.amax + row) : whole;
    Raw<16> out[sizeof(T) / 2];
    decode8<T>(codes[i], fp4_factor(scale, amax), out);
    auto* target = reinterpret_cast<Raw<16>*>(y) + at * (sizeof(T) / 2);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(T) / 2); ++j) target[j] = out[j];
  }
}

int64_t grid_for(uint64_t units, int per_thread) {
  const int64_t tile = int64_t{kThreads} * per_thread;
  return (static_cast<int64_t>(units) + tile - 1) / tile;
}

}  // namespace

void launch_fp4_amax(const Fp4Source& x, bool columns, float* amax, Float in, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(amax, 0, sizeof(float), stream), "memset");
  const int64_t width = columns ? x.cols : x.cols / kFp4Block;
  const int64_t count = columns ? x.rows / kFp4Block * width : x.rows * width;
  if (count == 0) return;
  const int64_t grid = grid_for(count, kAmaxUnroll);
  const Divider by_width(width, count);
  with_float<bf16, f16>(in, [&](auto t) {
    using T = decltype(t);
    launch(columns ? fp4_amax<T, true> : fp4_amax<T, false>, grid, kThreads, stream, false, x,
           static_cast<uint32_t>(width), static_cast<uint64_t>(count), by_width, amax);
  });
}

void launch_fp4_dequantize(const Fp4Result& q, bool square, void* y, Float out,
                           cudaStream_t stream) {
  const uint64_t words = uint64_t{q.rows} * q.blocks * 2;
  if (words == 0) return;
  const Divider by_width(q.blocks, static_cast<int64_t>(words / 2));
  with_float<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    launch(square ? fp4_dequantize<T, true> : fp4_dequantize<T, false>,
           grid_for(words, kWordUnroll), kThreads, stream, false, q, static_cast<T*>(y), words,
           by_width);
  });
}

}  // namespace ixt
