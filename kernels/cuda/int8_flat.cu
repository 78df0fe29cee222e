// INT8 quantize with one scale for the tensor or a few long rows, and dequantize.
#include "flat.cuh"
#include "int_device.cuh"
#include "int_launch.h"

namespace ixt {

void launch_int8_current(const QuantizeArgs& args, Float in, Target target) {
  with_type<bf16, f16>(in, [&](auto t) {
    using T = decltype(t);
    if (aligned_rows(args, kVector<T>)) {
      run_current<T, Int8, kVector<T>>(args, Whole{args.stride}, target);
    } else {
      run_current<T, Int8, 1>(args, Whole{args.stride}, target);
    }
  });
}

void launch_dequantize_int8(const uint8_t* q, const float* scale, void* y, int64_t n, int64_t cols,
                            Float out, Target target) {
  if (n == 0) return;
  with_type<bf16, f16>(out, [&](auto t) {
    using T = decltype(t);
    constexpr int N = kVector<T>;
    const bool whole = cols == n;
    const bool wide = reinterpret_cast<uintptr_t>(q) % N == 0 && (whole || cols % N == 0);
    const auto run = whole ? (wide ? run_dequantize<T, Int8, N, false>
                                   : run_dequantize<T, Int8, 1, false>)
                           : (wide ? run_dequantize<T, Int8, N, true>
                                   : run_dequantize<T, Int8, 1, true>);
    run(q, scale, y, n, cols, target);
  });
}

}  // namespace ixt
