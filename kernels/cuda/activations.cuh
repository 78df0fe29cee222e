// Activations as functions of fp32, and their derivatives: decompositions/activations.py's.
#pragma once

#include "floats.cuh"

namespace ixt {
namespace {

// The quick division is off by 2 ulp of fp32 at most, and 0 from 2^126 on, where expf nearly
// overflows: the exact one takes as long as all the rest.
struct Silu {
  __device__ __forceinline__ static float value(float x) {
    return __fdividef(x, 1.0f + expf(-x));
  }
  __device__ __forceinline__ static void both(float x, float& value, float& slope) {
    const float s = __fdividef(1.0f, 1.0f + expf(-x));
    value = x * s;
    slope = s * (1.0f + x * (1.0f - s));
  }
};

struct GeluErf {
  static constexpr float kRoot = 0.70710678118654752f;   // 1 / sqrt(2)
  static constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  __device__ __forceinline__ static float value(float x) {
    return x * (0.5f * (1.0f + erff(x * kRoot)));
  }
  __device__ __forceinline__ static void both(float x, float& value, float& slope) {
    const float below = 0.5f * (1.0f + erff(x * kRoot));
    value = x * below;
    slope = below + x * (kDensity * expf(-0.5f * x * x));
  }
};

struct GeluTanh {
  static constexpr float kBeta = 0.7978845608028654f;  // sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  __device__ __forceinline__ static float value(float x) {
    return 0.5f * x * (1.0f + tanhf(kBeta * (x + kCubic * (x * x * x))));
  }
  __device__ __forceinline__ static void both(float x, float& value, float& slope) {
    const float t = tanhf(kBeta * (x + kCubic * (x * x * x)));
    value = 0.5f * x * (1.0f + t);
    // Farther out the slope is 0 or 1, and x * x overflows.
    const float near = x > 100.0f ? 100.0f : x < -100.0f ? -100.0f : x;
    const float inner = kBeta * (1.0f + 3.0f * kCubic * (near * near));
    slope = 0.5f * (1.0f + t) + 0.5f * near * ((1.0f - t * t) * inner);
  }
};

struct Relu2 {
  __device__ __forceinline__ static float value(float x) {
    const float v = x <= 0.0f ? 0.0f : x;  // keeps NaN
    return v * v;
  }
  __device__ __forceinline__ static void both(float x, float& value, float& slope) {
    const float v = x <= 0.0f ? 0.0f : x;
    value = v * v;
    slope = 2.0f * v;
  }
};

}  // namespace
}  // namespace ixt
