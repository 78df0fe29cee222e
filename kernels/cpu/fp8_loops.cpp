// Branch-free loops that the compiler vectorizes. IXT_ISA names the instruction set of this build.
#include "fp8_loops.h"

#include "words.h"

namespace ixt {
namespace {

template <typename T>
float amax(const void* x, int64_t n) {
  return amax_of<T>(static_cast<const typename T::Word*>(x), n);
}

template <typename T, typename Format>
void quantize(const void* x, uint8_t* __restrict q, int64_t n, float scale) {
  const auto* __restrict words = static_cast<const typename T::Word*>(x);
  for (int64_t i = 0; i < n; ++i) q[i] = encode_fp8<Format>(T::load(words[i]) * scale);
}

template <typename T, typename Format>
void dequantize(const uint8_t* __restrict q, void* y, int64_t n, float scale_inv) {
  auto* __restrict words = static_cast<typename T::Word*>(y);
  for (int64_t i = 0; i < n; ++i) words[i] = T::store(decode_fp8<Format>(q[i]) * scale_inv);
}

template <typename T>
constexpr Fp8Loops loops() {
  return {&amax<T>,
          {&quantize<T, E4M3>, &quantize<T, E5M2>},
          {&dequantize<T, E4M3>, &dequantize<T, E5M2>}};
}

constexpr Fp8LoopTable table = {IXT_TEXT(IXT_ISA), loops<F32>(), loops<F16>(), loops<BF16>()};

}  // namespace

const Fp8LoopTable* IXT_CONCAT(fp8_loops_, IXT_ISA)() { return &table; }

}  // namespace ixt
