// Philox4x32-10, a counter-based generator: random bits that depend on nothing but their arguments.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.
#pragma once

#include "fp8.h"

namespace ixt {

// What random bits follow from: a seed, an offset, and which of the two streams.
struct RandomKey {
  uint64_t seed;
  uint64_t offset;
  uint32_t stream;
};

struct RandomWords {
  uint32_t word[4];
};

// One round: two 32 x 32 -> 64 bit products.
IXT_HD void philox_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t k0,
                         uint32_t k1) {
  const uint64_t first = static_cast<uint64_t>(a) * 0xD2511F53u;
  const uint64_t second = static_cast<uint64_t>(c) * 0xCD9E8D57u;
  a = static_cast<uint32_t>(second >> 32) ^ b ^ k0;
  b = static_cast<uint32_t>(second);
  c = static_cast<uint32_t>(first >> 32) ^ d ^ k1;
  d = static_cast<uint32_t>(first);
}

// The bits of one block of 16 elements: byte i is byte i % 4 of word i / 4. The counter is (block,
// stream in its top bit; offset), the key is the seed.
IXT_HD RandomWords philox_block(uint64_t block, const RandomKey& key) {
  uint32_t a = static_cast<uint32_t>(block);
  uint32_t b = static_cast<uint32_t>(block >> 32) | (key.stream << 31);
  uint32_t c = static_cast<uint32_t>(key.offset);
  uint32_t d = static_cast<uint32_t>(key.offset >> 32);
  uint32_t k0 = static_cast<uint32_t>(key.seed);
  uint32_t k1 = static_cast<uint32_t>(key.seed >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    philox_round(a, b, c, d, k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace ixt
