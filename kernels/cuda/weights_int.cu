// Weights in INT8 and INT4.
#include "weights_launch.cuh"

namespace ixt {

void launch_decode_int8(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::int8, false>(args, x, target);
}

void launch_decode_int4(DecodeArgs args, Float x, Target target) {
  if (args.packed != nullptr) {
    launch_decode<Code::int4, true>(args, x, target);
  } else {
    launch_decode<Code::int4, false>(args, x, target);
  }
}

}  // namespace ixt
