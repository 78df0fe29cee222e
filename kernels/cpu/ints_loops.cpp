// Branch-free loops that the compiler vectorizes. IXT_ISA names the instruction set of this build.
#include "ints_loops.h"

#include <algorithm>

#include "../common/ints.h"
#include "words.h"

namespace ixt {
namespace {

constexpr int64_t kMaxGroup = 256;

template <typename T>
const typename T::Word* words_of(const void* x) {
  return static_cast<const typename T::Word*>(x);
}

template <typename T>
float amax(const void* x, int64_t n) {
  return amax_of<T>(words_of<T>(x), n);
}

template <typename T>
IXT_HD void int8_run(const typename T::Word* __restrict x, int8_t* __restrict q, int64_t n,
                     float scale) {
  for (int64_t i = 0; i < n; ++i) {
    q[i] = static_cast<int8_t>(int_code(T::load(x[i]), scale, -kInt8Max, kInt8Max));
  }
}

template <typename T>
void int8(const void* x, int8_t* q, int64_t n, float scale) {
  int8_run<T>(words_of<T>(x), q, n, scale);
}

template <typename T>
void int8_groups(const void* x, int8_t* q, float* scale, int64_t n, int64_t group) {
  const auto* words = words_of<T>(x);
  for (int64_t first = 0; first < n; first += group) {
    const int64_t count = std::min(group, n - first);
    *scale = int_scale(amax_of<T>(words + first, count), kInt8Max);
    int8_run<T>(words + first, q + first, count, *scale++);
  }
}

// Codes of -8..15, one a byte -> two a byte, the even one in the low nibble.
IXT_HD void pack(const int8_t* __restrict codes, uint8_t* __restrict q, int64_t n) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const uint32_t low = static_cast<uint8_t>(codes[2 * i]) & 15u;
    q[i] = static_cast<uint8_t>(low | static_cast<uint32_t>(codes[2 * i + 1]) << 4);
  }
}

template <typename T>
void int4_symmetric(const void* x, uint8_t* q, float* scale, int64_t n, int64_t group) {
  const auto* words = words_of<T>(x);
  int8_t codes[kMaxGroup];
  for (int64_t first = 0; first < n; first += group) {
    const float s = int_scale(amax_of<T>(words + first, group), 7.0f);
    for (int64_t i = 0; i < group; ++i) {
      codes[i] = static_cast<int8_t>(int_code(T::load(words[first + i]), s, -8.0f, 7.0f));
    }
    pack(codes, q + first / 2, group);
    *scale++ = s;
  }
}

// Largest x and -x, at least 0: magnitudes of the elements of one sign, NaN counts as 0.
template <typename T>
IXT_HD Extent extent_of(const typename T::Word* x, int64_t n) {
  using Int = Magnitude<T>;
  Int below = 0;
  Int above = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Int mag = magnitude<T>(x[i]);
    const Int negative = static_cast<Int>(x[i]) < 0 ? mag : Int(0);
    const Int positive = static_cast<Int>(x[i]) < 0 ? Int(0) : mag;
    below = below > negative ? below : negative;
    above = above > positive ? above : positive;
  }
  return {magnitude_value<T>(below), magnitude_value<T>(above)};
}

template <typename T>
void int4_asymmetric(const void* x, uint8_t* q, float* scale, uint8_t* zero, int64_t n,
                     int64_t group) {
  const auto* words = words_of<T>(x);
  int8_t codes[kMaxGroup];
  for (int64_t first = 0; first < n; first += group) {
    const Extent extent = extent_of<T>(words + first, group);
    const float s = asymmetric_scale(extent);
    const int32_t z = asymmetric_zero(extent, s);
    for (int64_t i = 0; i < group; ++i) {
      codes[i] = static_cast<int8_t>(asymmetric_code(T::load(words[first + i]), s, z));
    }
    pack(codes, q + first / 2, group);
    *scale++ = s;
    *zero++ = static_cast<uint8_t>(z);
  }
}

template <typename T>
void dequantize_int8(const int8_t* __restrict q, const float* scale, void* y, int64_t n,
                     int64_t group) {
  auto* __restrict words = static_cast<typename T::Word*>(y);
  for (int64_t first = 0; first < n; first += group) {
    const int64_t last = std::min(n, first + group);
    const float s = *scale++;
    for (int64_t i = first; i < last; ++i) {
      words[i] = T::store(static_cast<float>(static_cast<int32_t>(q[i])) * s);
    }
  }
}

template <typename T>
void dequantize_int4(const uint8_t* __restrict q, const float* scale, const uint8_t* zero, void* y,
                     int64_t n, int64_t group) {
  auto* __restrict words = static_cast<typename T::Word*>(y);
  uint8_t nibbles[kMaxGroup];
  for (int64_t first = 0; first < n; first += group) {
    const float s = *scale++;
    const uint8_t* bytes = q + first / 2;
    for (int64_t i = 0; i < group / 2; ++i) {
      nibbles[2 * i] = bytes[i] & 15u;
      nibbles[2 * i + 1] = static_cast<uint8_t>(bytes[i] >> 4);
    }
    // Two's complement: flip the sign bit, then take its weight away.
    const uint32_t flip = zero ? 0 : 8;
    const int32_t offset = zero ? *zero++ : 8;
    for (int64_t i = 0; i < group; ++i) {
      const int32_t number = static_cast<int32_t>(nibbles[i] ^ flip) - offset;
      words[first + i] = T::store(static_cast<float>(number) * s);
    }
  }
}

template <typename T>
constexpr IntLoops loops() {
  return {&amax<T>,           &int8<T>,
          &int8_groups<T>,    &int4_symmetric<T>,
          &int4_asymmetric<T>, &dequantize_int8<T>,
          &dequantize_int4<T>};
}

constexpr IntLoopTable table = {loops<F32>(), loops<F16>(), loops<BF16>()};

}  // namespace

const IntLoopTable* IXT_CONCAT(int_loops_, IXT_ISA)() { return &table; }

}  // namespace ixt
