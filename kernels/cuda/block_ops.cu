// Quantize and dequantize blocks, whatever the kind of scale: outputs and choice of kernel.
#include "block_ops.h"

namespace ixt {
namespace {

// Below this many elements the second launch costs more than it saves.
constexpr int64_t kSpreadElements = int64_t{1} << 25;

// Scales that lie in lines of a large tensor are first written side by side: see block_scales.cu.
// Where a tile has one side only, it is not worth it.
class SpreadScales {
 public:
  SpreadScales(BlockArgs& args, Place place) {
    if (args.rows * args.cols <= kSpreadElements) return;
    for (int side = 0; side < 2; ++side) {
      ScaleView& view = args.side[side];
      const bool bytes = view.form == ScaleForm::e8m0;
      const int64_t words = bytes ? view.blocks / 4 : view.blocks;
      const bool in_lines = view.form != ScaleForm::swizzled && view.block == 1 && words > 1;
      if (!in_lines || (bytes && view.blocks % 4 != 0)) continue;
      buffers_.push_back(empty_matrix(words, view.lines, dtype_codes().f32, place));
      spread_.matrix[side] = {buffers_.back().data<uint32_t>(), static_cast<uint32_t*>(view.data),
                              view.lines, words};
      view.data = buffers_.back().data();
      view.form = bytes ? ScaleForm::stacked : ScaleForm::spread;
      view.line = 1;
      view.block = view.lines;
    }
  }

  void finish(Target target) const { launch_spread_scales(spread_, target); }

 private:
  std::vector<Output> buffers_;  // freed on return, which the allocator orders after the kernels
  SpreadArgs spread_{};
};

}  // namespace

Quantized quantize_blocks(const Tensor& x, const BlockInput& input, BlockShape block,
                          bool transposed, const BlockRule& rule, bool gemm) {
  const DeviceScope scope(input.place.index);
  const int side = block.square() ? transposed : block.k == 1;
  BlockArgs args = input.args();
  args.rule = rule;
  args.group = block.group();
  Output codes = empty_codes(x, input, transposed);
  (transposed ? args.codes_t : args.codes) = codes.data<uint8_t>();
  Scales scales = make_scales({side, transposed, args.group, block.square(), rule.mx, gemm}, x,
                              input);
  args.side[side] = scales.view;
  const Target target = target_on(input.place);
  if (args.rows == 0 || args.cols == 0) return {std::move(codes), std::move(scales.tensor)};
  if (block.m == 1 && !transposed) {
    launch_block_rows(args, input.in, input.out, target);
  } else {
    const BlockKind kind = block.square()               ? BlockKind::one
                           : side == (transposed ? 1 : 0) ? BlockKind::columns
                                                          : BlockKind::crossed;
    launch_block_tiles(args, kind, input.in, input.out, target);
  }
  return {std::move(codes), std::move(scales.tensor)};
}

QuantizedBoth quantize_blocks_both(const Tensor& x, const BlockInput& input, int group, bool square,
                                   bool transposed, const BlockRule& rule, bool gemm) {
  if (square && !transposed) {  // the same result twice
    const BlockShape block{group, group};
    auto [codes, scales] = quantize_blocks(x, input, block, false, rule, gemm);
    auto [again, scales_again] = quantize_blocks(x, input, block, false, rule, gemm);
    return {std::move(codes), std::move(scales), std::move(again), std::move(scales_again)};
  }
  const DeviceScope scope(input.place.index);
  BlockArgs args = input.args();
  args.rule = rule;
  args.group = group;
  Output codes = empty_codes(x, input, false);
  Scales scales = make_scales({0, false, group, square, rule.mx, gemm}, x, input);
  Output other = empty_codes(x, input, transposed);
  Scales other_scales = make_scales({1, transposed, group, square, rule.mx, gemm}, x, input);
  args.codes = codes.data<uint8_t>();
  (transposed ? args.codes_t : args.codes_m) = other.data<uint8_t>();
  args.side[0] = scales.view;
  args.side[1] = other_scales.view;
  if (args.rows > 0 && args.cols > 0) {
    const Target target = target_on(input.place);
    if (square) {
      launch_block_tiles(args, BlockKind::one, input.in, input.out, target);
    } else {
      const SpreadScales spread(args, input.place);
      launch_block_tiles(args, transposed ? BlockKind::lines : BlockKind::beside, input.in,
                         input.out, target);
      spread.finish(target);
    }
  }
  return {std::move(codes), std::move(scales.tensor), std::move(other),
          std::move(other_scales.tensor)};
}

namespace {

void check_scales(const Tensor& codes, const Tensor& scales, const char* name, int32_t dtype,
                  const std::vector<int64_t>& shape) {
  IXT_CHECK(dtype_code(scales) == dtype, "`", name, "` must be ", dtype_name(dtype).substr(6),
            ", got ", dtype_name(dtype_code(scales)).substr(6));
  const Place place = place_of(codes);
  const Place other = place_of(scales);
  IXT_CHECK(place.type == other.type && place.index == other.index, "`", name,
            "` must be on the device of `codes`, ", device_text(place), ", got ",
            device_text(other));
  const auto sizes = scales.sizes();
  bool same = sizes.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = sizes[i] == shape[i];
  if (same) return;
  fail("`", name, "` must have the shape ", shape_text(shape), ", got ", shape_text(scales));
}

std::vector<int64_t> scale_shape(const Tensor& codes, int64_t rows, int64_t cols, BlockShape block,
                                 bool mx, bool gemm) {
  const int64_t down = ceil_div(rows, block.m);
  const int64_t across = ceil_div(cols, block.k);
  if (mx && gemm) {
    return block.k == 1 ? std::vector<int64_t>{round_up(cols, kSwizzleRows),
                                               round_up(down, kSwizzleCols)}
                        : std::vector<int64_t>{round_up(rows, kSwizzleRows),
                                               round_up(across, kSwizzleCols)};
  }
  if (block.m == 1 && !gemm) {
    const auto sizes = codes.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    shape.back() = across;
    return shape;
  }
  return {down, gemm && block.square() ? round_up(across, 4) : across};
}

}  // namespace

Output dequantize_blocks(const Tensor& codes_any, const Tensor& scales_any, const char* name,
                         int32_t dtype, BlockShape block, ScalarType result, bool gemm) {
  const Fp8 in = fp8_dtype(codes_any, "codes");
  const Float out = float_dtype(result);
  check_has_rows(codes_any, "codes");
  const bool mx = dtype != dtype_codes().f32;
  const int64_t rows = row_count(codes_any);
  const int64_t cols = codes_any.size(codes_any.dim() - 1);
  check_scales(codes_any, scales_any, name, dtype,
               scale_shape(codes_any, rows, cols, block, mx, gemm));
  const Place place = place_of(codes_any);
  const DeviceScope scope(place.index);
  const bool swizzled = mx && gemm;
  const bool matrix = scales_any.dim() == 2 && !swizzled;
  const Tensor codes = as_contiguous(codes_any);
  const Tensor scales = matrix ? scales_any : as_contiguous(scales_any);
  Output y = empty_like(codes, code_of(out), place);

  DequantizeArgs args{};
  args.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  args.y = y.data();
  args.rows = rows;
  args.cols = cols;
  args.block_m = static_cast<int>(block.m);
  args.block_k = static_cast<int>(block.k);
  args.lines_are_columns = swizzled && block.k == 1;
  args.line_step = swizzled && block.square() ? args.block_m : 1;
  ScaleView& view = args.scales;
  view.data = const_cast<void*>(scales.const_data_ptr());
  view.form = swizzled ? ScaleForm::swizzled : mx ? ScaleForm::e8m0 : ScaleForm::fp32;
  view.blocks = args.lines_are_columns ? ceil_div(rows, block.m) : ceil_div(cols, block.k);
  view.line = matrix ? scales.strides()[0] : view.blocks;
  view.block = matrix ? scales.strides()[1] : 1;
  launch_block_dequantize(args, in, out, target_on(place));
  return y;
}

}  // namespace ixt
