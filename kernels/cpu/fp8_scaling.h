// From amaxes to FP8 scales, on the loops of this machine.
#pragma once

#include "tiles.h"

namespace ixt {

class Fp8Scaling {
 public:
  using Stored = float;  // 1 / scale

  Fp8Scaling(Fp8 out, const ScaleRule& rule)
      : scales_(block_loop_table().fp8_scales[static_cast<int>(out)]), rule_(rule) {}

  void operator()(const float* amax, int64_t n, float* scale, float* scale_inv) const {
    scales_(amax, n, rule_, scale, scale_inv);
  }

 private:
  void (*scales_)(const float*, int64_t, const ScaleRule&, float*, float*);
  ScaleRule rule_;
};

}  // namespace ixt
