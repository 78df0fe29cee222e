// Branch-free loops over the blocks of a strip, which the compiler vectorizes.
#include "nvfp4_loops.h"

#include "../common/nvfp4.h"
#include "words.h"

namespace ixt {
namespace {

template <typename T>
void load_rows(const void* x, int64_t n, Fp4Elements& out) {
  const auto* words = static_cast<const typename T::Word*>(x);
  for (int64_t w = 0; w < n; ++w) {
    float values[16];
    for (int64_t i = 0; i < 16; ++i) values[i] = T::load(words[16 * w + i]);
    for (int64_t i = 0; i < 16; ++i) out[i][w] = values[i];
  }
}

template <typename T>
void load_columns(const void* x, int64_t stride, int64_t n, Fp4Elements& out) {
  const auto* words = static_cast<const typename T::Word*>(x);
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t w = 0; w < n; ++w) out[i][w] = T::load(words[i * stride + w]);
  }
}

// The value of a code: from 1 on its bits are those of fp32, moved.
IXT_HD float decode_fp4(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.5f;
  const uint32_t large = (magnitude << 22) + (126u << 23);
  const uint32_t bits = magnitude < 2 ? bit_copy<uint32_t>(small) : large;
  return bit_copy<float>(bits | (code & 8u) << 28);
}

template <typename T>
void dequantize(const uint8_t* __restrict codes, const float* __restrict factor, int64_t n,
                void* y) {
  auto* __restrict words = static_cast<typename T::Word*>(y);
  for (int64_t w = 0; w < 2 * n; ++w) {  // half blocks: eight codes in a word
    const float f = factor[w / 2];
    uint32_t eight;
    memcpy(&eight, codes + 4 * w, 4);
    for (uint32_t i = 0; i < 8; ++i) {
      words[8 * w + i] = T::store(decode_fp4(eight >> (4 * i) & 15u) * f);
    }
  }
}

// Sixteen blocks at a time, one in each lane of a vector.
using Lanes = float __attribute__((vector_size(64)));

void hadamard(Fp4Elements& a, int64_t n) {
  for (int64_t first = 0; first < n; first += 16) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(n - first < 16 ? n - first : 16);
    Lanes v[16] = {};
    for (int64_t i = 0; i < 16; ++i) memcpy(&v[i], &a[i][first], bytes);
    hadamard16(v);
    for (int64_t i = 0; i < 16; ++i) memcpy(&a[i][first], &v[i], bytes);
  }
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t w = 0; w < n; ++w) a[i][w] = BF16::load(BF16::store(a[i][w]));
  }
}

void raise_amax(const Fp4Elements& a, int64_t n, float* amax) {
  for (int64_t w = 0; w < n; ++w) {
    uint32_t best = bit_copy<uint32_t>(amax[w]);  // bits of magnitudes order like the numbers
    for (int64_t i = 0; i < 16; ++i) {
      const uint32_t magnitude = bit_copy<uint32_t>(a[i][w]) & 0x7FFFFFFFu;
      const uint32_t number = magnitude > kFloatInf ? 0u : magnitude;
      best = best > number ? best : number;
    }
    amax[w] = bit_copy<float>(best);
  }
}

void scales(Fp4Strip& s, int64_t n) {
  for (int64_t w = 0; w < n; ++w) {
    const Fp4Global global{s.encode_sixth[w], s.decode[w]};
    s.scale[w] = encode_fp8<E4M3>(fp4_scale(s.amax[w], global));
  }
  for (int64_t w = 0; w < n; ++w) {
    const Fp4Global global{s.encode_sixth[w], s.decode[w]};
    s.multiplier[w] = fp4_multiplier(decode_fp8<E4M3>(s.scale[w]), global);
  }
}

void random(Fp4Strip& s, int64_t n, uint64_t first, uint64_t step, const RandomKey& key) {
  for (int64_t w = 0; w < n; ++w) {
    const RandomWords bits = philox_block(first + static_cast<uint64_t>(w) * step, key);
    for (int64_t i = 0; i < 4; ++i) s.random[i][w] = bits.word[i];
  }
}

constexpr uint32_t kSixBits = 0x40C00000u;
constexpr uint32_t kOneBits = 0x3F800000u;
constexpr uint32_t kHalfBits = 0x3F000000u;

// The largest power of two that is not above a magnitude, and at least 1.
IXT_HD float power_below(uint32_t magnitude) {
  const uint32_t power = magnitude & kFloatInf;
  return bit_copy<float>(power > kOneBits ? power : kOneBits);
}

template <bool Stochastic>
IXT_HD uint32_t encode_one(float v, uint32_t byte) {
  const uint32_t bits = bit_copy<uint32_t>(v);
  const uint32_t raw = bits & 0x7FFFFFFFu;
  const uint32_t magnitude = raw > kSixBits ? kSixBits : raw;
  const float a = bit_copy<float>(magnitude);
  const float power = power_below(magnitude);
  uint32_t code;
  if constexpr (Stochastic) {
    const float half_u = static_cast<float>(static_cast<int32_t>(byte)) * 0x1p-9f;
    const uint32_t t = bit_copy<uint32_t>(a + half_u * power);
    const uint32_t small = t >= kHalfBits ? 1u : 0u;
    code = t >= kOneBits ? (t >> 22) - 252u : small;  // truncated
  } else {
    code = fp4_code(bit_copy<uint32_t>(a + power * kFp4Magic)) & 15u;
  }
  return raw > kFloatInf ? 7u : code | (bits >> 28 & 8u);
}

template <bool Stochastic>
void encode_strip(const Fp4Elements& a, Fp4Strip& s, int64_t n) {
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t w = 0; w < n; ++w) {
      const float r = s.multiplier[w];
      const uint32_t low = Stochastic ? s.random[2 * half][w] : 0;
      const uint32_t high = Stochastic ? s.random[2 * half + 1][w] : 0;
      uint32_t codes = 0;
      for (int64_t i = 0; i < 8; ++i) {
        const uint32_t byte = (i < 4 ? low : high) >> (8 * (i % 4)) & 255u;
        codes |= encode_one<Stochastic>(a[8 * half + i][w] * r, byte) << (4 * i);
      }
      s.codes[half][w] = codes;
    }
  }
}

void encode(const Fp4Elements& a, Fp4Strip& s, int64_t n, bool stochastic) {
  if (stochastic) {
    encode_strip<true>(a, s, n);
  } else {
    encode_strip<false>(a, s, n);
  }
}

void factors(const uint8_t* scale, const float* amax, int64_t n, float* factor) {
  for (int64_t w = 0; w < n; ++w) factor[w] = fp4_factor(decode_fp8<E4M3>(scale[w]), amax[w]);
}

template <typename T>
constexpr Fp4TypedLoops typed() {
  return {&load_rows<T>, &load_columns<T>, &dequantize<T>};
}

constexpr Fp4Loops table = {typed<F32>(), typed<F16>(), typed<BF16>(), &hadamard, &raise_amax,
                            &scales,      &random,      &encode,       &factors};

}  // namespace

const Fp4Loops* IXT_CONCAT(fp4_loops_, IXT_ISA)() { return &table; }

}  // namespace ixt
