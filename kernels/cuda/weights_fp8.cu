// Weights in FP8, with fp32 scales or MXFP8's.
#include "weights_launch.cuh"

namespace ixt {

void launch_decode_e4m3(DecodeArgs args, Float x, Target target) {
  if (args.packed != nullptr) {
    launch_decode<Code::e4m3, true>(args, x, target);
  } else {
    launch_decode<Code::e4m3, false>(args, x, target);
  }
}

void launch_decode_e5m2(DecodeArgs args, Float x, Target target) {
  if (args.packed != nullptr) {
    launch_decode<Code::e5m2, true>(args, x, target);
  } else {
    launch_decode<Code::e5m2, false>(args, x, target);
  }
}

}  // namespace ixt
