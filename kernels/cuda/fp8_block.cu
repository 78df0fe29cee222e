// FP8 with a scale a block on CUDA: argument checks and registration.
#include "block_ops.h"

namespace ixt {
namespace {

bool is_group(int64_t n) { return n == 32 || n == 64 || n == 128; }

BlockShape check_block(int64_t m, int64_t k) {
  const int64_t size = m > k ? m : k;
  const int64_t other = m > k ? k : m;
  IXT_CHECK(is_group(size) && (other == 1 || other == size),
            "`block_m` and `block_k` must be (1, G), (G, 1) or (G, G) with G = 32, 64 or 128, ",
            "got (", m, ", ", k, ")");
  return {m, k};
}

bool check_layout(const std::string& layout, bool columns) {
  const bool gemm = is_gemm(layout);
  IXT_CHECK(!(columns && gemm),
            "`layout` must be \"plain\" for G x 1 blocks of codes that are not transposed (a GEMM "
            "takes them transposed), got \"gemm\"");
  return gemm;
}

BlockRule fp8_rule(const BlockInput& input, double eps, bool pow2) {
  return {scale_rule(eps, pow2, max_finite(input.in)), false, false};
}

Quantized quantize_fp8_block(const Tensor& x, ScalarType dtype, int64_t block_m, int64_t block_k,
                             bool transposed, double eps, bool pow2, const std::string& layout) {
  const BlockInput input(x, dtype);
  const BlockShape block = check_block(block_m, block_k);
  const BlockRule rule = fp8_rule(input, eps, pow2);
  const bool gemm = check_layout(layout, block.k == 1 && !transposed);
  return quantize_blocks(x, input, block, transposed, rule, gemm);
}

QuantizedBoth quantize_fp8_block_both(const Tensor& x, ScalarType dtype, int64_t block, bool square,
                                      double eps, bool pow2, const std::string& layout) {
  const BlockInput input(x, dtype);
  IXT_CHECK(is_group(block), "`block` must be 32, 64 or 128, got ", block);
  const BlockRule rule = fp8_rule(input, eps, pow2);
  return quantize_blocks_both(x, input, static_cast<int>(block), square, true, rule,
                              is_gemm(layout));
}

Output dequantize_fp8_block(const Tensor& codes, const Tensor& scale_inv, int64_t block_m,
                            int64_t block_k, ScalarType dtype, const std::string& layout) {
  const BlockShape block = check_block(block_m, block_k);
  const bool gemm = check_layout(layout, block.k == 1);
  return dequantize_blocks(codes, scale_inv, "scale_inv", dtype_codes().f32, block, dtype, gemm);
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("quantize_fp8_block", ixt::Boxed<ixt::quantize_fp8_block>::call);
  m.impl("quantize_fp8_block_both", ixt::Boxed<ixt::quantize_fp8_block_both>::call);
  m.impl("dequantize_fp8_block", ixt::Boxed<ixt::dequantize_fp8_block>::call);
}
