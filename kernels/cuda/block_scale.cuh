// From the amax of a block to the factor of its elements, and where its scale is written.
#pragma once

#include "../common/mxfp8.h"
#include "../common/scale_layout.h"
#include "blocks.h"

namespace ixt {

// at / size, for the size of a block, a power of two.
__device__ __forceinline__ int64_t block_index(int64_t at, int size) {
  return at >> (__ffs(size) - 1);
}

struct BlockScale {
  float factor;     // what elements are multiplied by
  uint32_t stored;  // fp32: the bits of 1 / factor; e8m0: the exponent
};

template <typename Format>
__device__ __forceinline__ BlockScale block_scale(float amax, const BlockRule& rule) {
  if (rule.mx) {
    const uint32_t e = rule.floor ? e8m0_floor<Format>(amax) : e8m0_ceil<Format>(amax);
    return {e8m0_inverse(e), e};
  }
  const float scale = scale_from_amax<Format>(amax, rule.fp8);
  return {scale, __float_as_uint(__fdiv_rn(1.0f, scale))};
}

__device__ __forceinline__ int64_t swizzle_pitch(const ScaleView& view) {
  return round_up(view.blocks, kSwizzleCols);
}

// A word that the next kernel reads: the L2 cache is to keep it until then.
__device__ __forceinline__ void store_kept(uint32_t* to, uint32_t word) {
  asm volatile("{\n\t.reg .b64 p;\n\t"
               "createpolicy.fractional.L2::evict_last.b64 p, 1.0;\n\t"
               "st.global.L2::cache_hint.u32 [%0], %1, p;\n\t}"
               :: "l"(to), "r"(word) : "memory");
}

// A scale that is not swizzled.
__device__ __forceinline__ void store_scale(const ScaleView& view, int64_t line, int64_t block,
                                            uint32_t stored) {
  if (line >= view.lines || block >= view.blocks) return;
  const int64_t at = line * view.line + block * view.block;
  if (view.form == ScaleForm::e8m0) {
    static_cast<uint8_t*>(view.data)[at] = static_cast<uint8_t>(stored);
    return;
  }
  if (view.form == ScaleForm::spread) {
    store_kept(static_cast<uint32_t*>(view.data) + at, stored);
    return;
  }
  float* out = static_cast<float*>(view.data);
  out[at] = __uint_as_float(stored);
  if (block == view.blocks - 1) {
#pragma unroll 1
    for (int64_t i = 1; i <= view.padding; ++i) out[at + i * view.block] = 0.0f;
  }
}

// The scales of four blocks from `block` on, a multiple of 4. Where lines are not padded and hold a
// multiple of 4, as most do, one store: strided single bytes cost as much as all of the codes.
__device__ __forceinline__ void store_four(const ScaleView& view, int64_t line, int64_t block,
                                           const uint32_t (&stored)[4]) {
  const bool bytes = view.form != ScaleForm::fp32 && view.form != ScaleForm::spread;
  const uint32_t packed =
      stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24;  // of bytes
  if (view.form == ScaleForm::swizzled) {  // padding too, whose scales are 0
    const int64_t at = swizzled(line, block, swizzle_pitch(view));
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(view.data) + at) = packed;
  } else if (view.form == ScaleForm::stacked) {
    if (line >= view.lines || block >= view.blocks) return;
    store_kept(static_cast<uint32_t*>(view.data) + block / 4 * view.lines + line, packed);
  } else if (view.block == 1 && view.line % 4 == 0 && view.padding == 0) {
    if (line >= view.lines) return;
    const int64_t at = line * view.line + block;
    if (bytes) {
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(view.data) + at) = packed;
    } else {
      *reinterpret_cast<uint4*>(static_cast<float*>(view.data) + at) = {stored[0], stored[1],
                                                                       stored[2], stored[3]};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_scale(view, line, block + i, stored[i]);
  }
}

// What codes are multiplied by, in two steps, so that many loads can be under way.
template <ScaleForm form>
__device__ __forceinline__ uint32_t load_scale(const ScaleView& view, int64_t line, int64_t block) {
  const int64_t at = form == ScaleForm::swizzled ? swizzled(line, block, swizzle_pitch(view))
                                                 : line * view.line + block * view.block;
  if constexpr (form == ScaleForm::fp32) {
    return __ldg(static_cast<const uint32_t*>(view.data) + at);
  } else {
    return __ldg(static_cast<const uint8_t*>(view.data) + at);
  }
}

__device__ __forceinline__ float scale_value(uint32_t stored, ScaleForm form) {
  return form == ScaleForm::fp32 ? __uint_as_float(stored) : e8m0_value(stored);
}

}  // namespace ixt
