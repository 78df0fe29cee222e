// FP8 quantize with one scale for the tensor or a few long rows, and dequantize.
#include "flat.cuh"

namespace ixt {

void launch_quantize_static(const QuantizeArgs& args, Float in, Fp8 out, Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (aligned_rows(args, kVector<T>)) {
      run_static<T, Format, kVector<T>>(args, target);
    } else {
      run_static<T, Format, 1>(args, target);
    }
  });
}

void launch_amax(const void* x, int64_t n, float* amax, Float in, Target target) {
  launch_clear(amax, 1, target);
  const auto run = [&](auto t) {
    using T = decltype(t);
    constexpr int N = kVector<T>;
    const bool wide = aligned16(x);
    const auto kernel = wide ? amax_flat<T, N, Whole> : amax_flat<T, 1, Whole>;
    launch(kernel, grid_for(wide ? n / N : n, kQuantizeUnroll), kThreads, target.stream,
           can_overlap(target.device, kernel), static_cast<const T*>(x), amax, n, Whole{n});
  };
  if (in == Float::bf16) {
    run(bf16{});
  } else if (in == Float::f16) {
    run(f16{});
  } else {
    run(float{});
  }
}

void launch_quantize_current(const QuantizeArgs& args, Float in, Fp8 out, Target target) {
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    constexpr int N = kVector<T>;
    if (args.pieces.length > 0) {
      run_current<T, Format, N>(args, InPieces(args, N), target);
    } else if (aligned_rows(args, N)) {
      run_current<T, Format, N>(args, Whole{args.stride}, target);
    } else {
      run_current<T, Format, 1>(args, Whole{args.stride}, target);
    }
  });
}

void launch_dequantize(const uint8_t* q, const float* scale_inv, void* y, int64_t n, int64_t cols,
                       Fp8 in, Float out, Target target) {
  if (n == 0) return;
  with_types<bf16, f16>(out, in, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    constexpr int N = kVector<T>;
    const bool whole = cols == n;
    const bool wide = reinterpret_cast<uintptr_t>(q) % N == 0 && (whole || cols % N == 0);
    if (whole) {
      wide ? run_dequantize<T, Format, N, false>(q, scale_inv, y, n, cols, target)
           : run_dequantize<T, Format, 1, false>(q, scale_inv, y, n, cols, target);
    } else {
      wide ? run_dequantize<T, Format, N, true>(q, scale_inv, y, n, cols, target)
           : run_dequantize<T, Format, 1, true>(q, scale_inv, y, n, cols, target);
    }
  });
}

}  // namespace ixt
