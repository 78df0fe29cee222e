// FP8 quantize with one scale a row.
#include "rows.cuh"

namespace ixt {

void launch_quantize_rows(const QuantizeArgs& args, Float in, Fp8 out, Target target) {
  if (args.rows == 0) return;
  with_types<bf16, f16>(in, out, [&](auto t, auto format) {
    using T = decltype(t);
    using Format = decltype(format);
    if (args.scale != nullptr) {
      launch_rows<T, Format, true>(args, target.stream);
    } else {
      launch_rows<T, Format, false>(args, target.stream);
    }
  });
}

}  // namespace ixt
