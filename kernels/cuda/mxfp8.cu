// MXFP8 on CUDA: argument checks and registration.
#include "block_ops.h"

namespace ixt {
namespace {

constexpr int kMxBlock = 32;

BlockShape check_block(int64_t m, int64_t k) {
  IXT_CHECK((m == 1 && k == kMxBlock) || (m == kMxBlock && (k == 1 || k == kMxBlock)),
            "`block_m` and `block_k` must be (1, 32), (32, 1) or (32, 32), got (", m, ", ", k, ")");
  return {m, k};
}

BlockRule mx_rule(const std::string& mode) {
  return {{}, true, check_choice("mode", mode, "ceil", "floor")};
}

Quantized quantize_mxfp8(const Tensor& x, ScalarType dtype, int64_t block_m, int64_t block_k,
                         bool transposed, const std::string& mode, const std::string& layout) {
  const BlockInput input(x, dtype);
  const BlockShape block = check_block(block_m, block_k);
  const BlockRule rule = mx_rule(mode);
  return quantize_blocks(x, input, block, transposed, rule, is_gemm(layout));
}

QuantizedBoth quantize_mxfp8_both(const Tensor& x, ScalarType dtype, bool square, bool transposed,
                                  const std::string& mode, const std::string& layout) {
  const BlockInput input(x, dtype);
  const BlockRule rule = mx_rule(mode);
  return quantize_blocks_both(x, input, kMxBlock, square, transposed, rule, is_gemm(layout));
}

Output dequantize_mxfp8(const Tensor& codes, const Tensor& scales, int64_t block_m, int64_t block_k,
                        ScalarType dtype, const std::string& layout) {
  const BlockShape block = check_block(block_m, block_k);
  return dequantize_blocks(codes, scales, "scales", aoti_torch_dtype_uint8(), block, dtype,
                           is_gemm(layout));
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("quantize_mxfp8", ixt::Boxed<ixt::quantize_mxfp8>::call);
  m.impl("quantize_mxfp8_both", ixt::Boxed<ixt::quantize_mxfp8_both>::call);
  m.impl("dequantize_mxfp8", ixt::Boxed<ixt::dequantize_mxfp8>::call);
}
