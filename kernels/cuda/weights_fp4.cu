// Weights in NVFP4.
#include "weights_launch.cuh"

namespace ixt {

void launch_decode_e2m1(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::e2m1, true>(args, x, target);
}

}  // namespace ixt
