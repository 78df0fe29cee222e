// NVFP4 in both orientations from one read of x.
#include "nvfp4_tile.cuh"

namespace ixt {

void launch_fp4_both(const Fp4Source& x, const Fp4Result& rows, const Fp4Result& columns,
                     const Fp4Options& options, Float in, cudaStream_t stream) {
  const int64_t height = rows.gemm ? rows.scale_rows : rows.rows;
  const int64_t width = rows.gemm ? columns.scale_rows : columns.rows;
  if (height == 0 || width == 0) return;
  with_float<bf16, f16>(in, [&](auto t) {
    launch_tiles<decltype(t), true>(x, rows, columns, options, height, width, stream);
  });
}

}  // namespace ixt
