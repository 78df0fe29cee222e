// Weights in INT8 and INT4.
#include "weights.cuh"

namespace ixt {

void launch_decode_int8(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::int8>(args, x, target);
}

void launch_decode_int4(DecodeArgs args, Float x, Target target) {
  launch_decode<Code::int4>(args, x, target);
}

}  // namespace ixt
