// Weights in FP8, with fp32 scales or MXFP8's.
#include "weights.cuh"

namespace ixt {

void launch_decode_e4m3(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::e4m3>(args, x, target);
}

void launch_decode_e5m2(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::e5m2>(args, x, target);
}

}  // namespace ixt
