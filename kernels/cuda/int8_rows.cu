// INT8 quantize with one scale a row.
#include "int_device.cuh"
#include "int_launch.h"
#include "rows.cuh"

namespace ixt {

void launch_int8_rows(const QuantizeArgs& args, Float in, Target target) {
  if (args.rows == 0) return;
  with_type<bf16, f16>(in, [&](auto t) {
    launch_rows<decltype(t), Int8, false>(args, target.stream);
  });
}

}  // namespace ixt
