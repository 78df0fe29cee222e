// From the amax of a block to the factor of its elements, and where its scale is written.
#pragma once

#include "../common/mxfp8.h"
#include "../common/scale_layout.h"
#include "blocks.h"

namespace ixt {

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

// Swizzled scales are written for the padding too, where `stored` must be 0.
__device__ __forceinline__ void store_scale(const ScaleView& view, int64_t line, int64_t block,
                                            uint32_t stored) {
  if (view.form == ScaleForm::swizzled) {
    const int64_t pitch = swizzle_pitch(view);
    if (line >= round_up(view.lines, kSwizzleRows) || block >= pitch) return;
    static_cast<uint8_t*>(view.data)[swizzled(line, block, pitch)] = static_cast<uint8_t>(stored);
    return;
  }
  if (line >= view.lines || block >= view.blocks) return;
  const int64_t at = line * view.line + block * view.block;
  if (view.form == ScaleForm::e8m0) {
    static_cast<uint8_t*>(view.data)[at] = static_cast<uint8_t>(stored);
    return;
  }
  float* out = static_cast<float*>(view.data);
  out[at] = __uint_as_float(stored);
  if (block == view.blocks - 1) {
#pragma unroll 1
    for (int64_t i = 1; i <= view.padding; ++i) out[at + i * view.block] = 0.0f;
  }
}

// What codes are multiplied by.
__device__ __forceinline__ float load_scale(const ScaleView& view, int64_t line, int64_t block) {
  if (view.form == ScaleForm::fp32) {
    return __ldg(static_cast<const float*>(view.data) + line * view.line + block * view.block);
  }
  const int64_t at = view.form == ScaleForm::swizzled ? swizzled(line, block, swizzle_pitch(view))
                                                      : line * view.line + block * view.block;
  return e8m0_value(__ldg(static_cast<const uint8_t*>(view.data) + at));
}

}  // namespace ixt
