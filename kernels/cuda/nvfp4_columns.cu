// NVFP4 along the columns of x: the result is that of the transpose.
#include "nvfp4_tile.cuh"

namespace ixt {

void launch_fp4_columns(const Fp4Source& x, const Fp4Result& y, const Fp4Options& options, Float in,
                        cudaStream_t stream) {
  const int64_t height = 16 * int64_t{y.gemm ? y.scale_cols : y.blocks};
  const int64_t width = y.gemm ? y.scale_rows : y.rows;
  if (height == 0 || width == 0) return;
  with_float<bf16, f16>(in, [&](auto t) {
    launch_tiles<decltype(t), false>(x, y, y, options, height, width, stream);
  });
}

}  // namespace ixt
