// NVFP4 on the CPU: threads, shapes and registration. The arithmetic is in nvfp4_loops.cpp and
// common/nvfp4.h; results do not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "../common/nvfp4_args.h"
#include "isa.h"
#include "nvfp4_loops.h"

namespace ixt {
namespace {

constexpr int64_t kGrain = 32 * 1024;  // elements that are worth a thread
constexpr int64_t kDepth = 8;          // blocks of a column that are gathered before they are stored

const Fp4Loops& loops() {
  static const Fp4Loops* best = IXT_BEST_OF(fp4_loops);
  return *best;
}

struct Input {
  Rows rows;
  const char* data;
  int64_t item;
  const Fp4TypedLoops* typed;

  explicit Input(const Tensor& x) : rows(as_rows(x)) {
    const Float dtype = float_dtype(x, "x");
    data = static_cast<const char*>(rows.tensor.const_data_ptr());
    item = item_size(dtype);
    typed = &loops_of(loops(), dtype);
  }
  const void* at(int64_t row, int64_t col) const {
    return data + (row * rows.stride + col) * item;
  }
};

// How the results of one orientation are made.
struct Job {
  Fp4Shape shape;
  bool hadamard;
  const float* amax;
  bool amax_per_row;
  const int64_t* rng;  // seed and offset, or nullptr
  uint8_t* codes;
  uint8_t* scales;

  RandomKey key() const {
    return {static_cast<uint64_t>(rng[0]), static_cast<uint64_t>(rng[1]), shape.transposed};
  }

  // Global scales for `n` entries: of one row, or of the rows from `row` on.
  void globals(Fp4Strip& strip, int64_t row, bool rows_differ, int64_t n) const {
    Fp4Global global = fp4_global(amax[amax_per_row ? row : 0]);
    for (int64_t w = 0; w < n; ++w) {
      if (rows_differ && amax_per_row && w > 0) global = fp4_global(amax[row + w]);
      strip.encode_sixth[w] = global.encode_sixth;
      strip.decode[w] = global.decode;
    }
  }

  int64_t scale_index(int64_t row, int64_t col) const {
    if (shape.gemm) return swizzled(row, col, shape.scale_cols());
    return (shape.square ? row / kFp4Block : row) * shape.blocks + col;
  }
};

void clear_padding(const Job& job) {
  if (!job.shape.gemm) return;
  memset(job.scales, 0, static_cast<size_t>(job.shape.scale_rows() * job.shape.scale_cols()));
}

template <typename F>
void in_parallel(int64_t tasks, int64_t elements_each, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) f(task);
  });
}

// ------------------------------------------------------------------------------- along the rows

// `n` blocks of a row; the strip holds their multipliers.
void finish_row_strip(const Job& job, const Fp4Elements& elements, Fp4Strip& strip, int64_t row,
                      int64_t col, int64_t n) {
  const int64_t first = row * job.shape.blocks + col;
  if (job.rng) loops().random(strip, n, static_cast<uint64_t>(first), 1, job.key());
  loops().encode(elements, strip, n, job.rng != nullptr);
  uint8_t* out = job.codes + first * 8;
  for (int64_t w = 0; w < n; ++w) {
    memcpy(out + 8 * w, &strip.codes[0][w], 4);
    memcpy(out + 8 * w + 4, &strip.codes[1][w], 4);
  }
  for (int64_t w = 0; w < n; ++w) job.scales[job.scale_index(row, col + w)] = strip.scale[w];
}

void row_strip(const Job& job, const Input& x, int64_t row, int64_t col, int64_t n) {
  Fp4Elements elements;
  Fp4Strip strip;
  x.typed->load_rows(x.at(row, col * kFp4Block), n, elements);
  if (job.hadamard) loops().hadamard(elements, n);
  std::fill(strip.amax, strip.amax + n, 0.0f);
  loops().raise_amax(elements, n, strip.amax);
  job.globals(strip, row, false, n);
  loops().scales(strip, n);
  finish_row_strip(job, elements, strip, row, col, n);
}

// 16 rows of 16x16 blocks.
void square_row_strip(const Job& job, const Input& x, int64_t row, int64_t col, int64_t n) {
  Fp4Elements elements;
  Fp4Strip strip;
  const int64_t end = std::min(job.shape.rows, row + kFp4Block);
  std::fill(strip.amax, strip.amax + n, 0.0f);
  for (int64_t r = row; r < end; ++r) {
    x.typed->load_rows(x.at(r, col * kFp4Block), n, elements);
    loops().raise_amax(elements, n, strip.amax);
  }
  job.globals(strip, 0, false, n);
  loops().scales(strip, n);
  for (int64_t r = row; r < end; ++r) {
    x.typed->load_rows(x.at(r, col * kFp4Block), n, elements);
    finish_row_strip(job, elements, strip, r, col, n);
  }
}

void quantize_rows(const Job& job, const Input& x) {
  clear_padding(job);
  const int64_t step = job.shape.square ? kFp4Block : 1;
  const int64_t tasks = (job.shape.rows + step - 1) / step;
  const auto strip = job.shape.square ? square_row_strip : row_strip;
  in_parallel(tasks, step * job.shape.blocks * kFp4Block, [&](int64_t task) {
    for (int64_t col = 0; col < job.shape.blocks; col += kStrip) {
      strip(job, x, task * step, col, std::min(kStrip, job.shape.blocks - col));
    }
  });
}

// ---------------------------------------------------------------------------- along the columns

// Let the 16 columns of each block share their amax.
void share_amax(float* amax, int64_t n) {
  for (int64_t first = 0; first < n; first += kFp4Block) {
    const int64_t end = std::min(n, first + kFp4Block);
    std::fill(amax + first, amax + end, *std::max_element(amax + first, amax + end));
  }
}

// Up to 64 columns and 8 blocks of each, gathered so that a column is written at once.
void column_tile(const Job& job, const Input& x, int64_t row, int64_t n, int64_t col,
                 int64_t depth) {
  Fp4Elements elements;
  Fp4Strip strip;
  uint32_t codes[kStrip][kDepth][2];
  uint8_t scales[kStrip][kDepth];
  job.globals(strip, row, true, n);
  for (int64_t d = 0; d < depth; ++d) {
    x.typed->load_columns(x.at((col + d) * kFp4Block, row), x.rows.stride, n, elements);
    if (job.hadamard) loops().hadamard(elements, n);
    std::fill(strip.amax, strip.amax + n, 0.0f);
    loops().raise_amax(elements, n, strip.amax);
    if (job.shape.square) share_amax(strip.amax, n);
    loops().scales(strip, n);
    if (job.rng) {
      const int64_t first = row * job.shape.blocks + col + d;
      loops().random(strip, n, static_cast<uint64_t>(first),
                     static_cast<uint64_t>(job.shape.blocks), job.key());
    }
    loops().encode(elements, strip, n, job.rng != nullptr);
    for (int64_t w = 0; w < n; ++w) {
      codes[w][d][0] = strip.codes[0][w];
      codes[w][d][1] = strip.codes[1][w];
      scales[w][d] = strip.scale[w];
    }
  }
  for (int64_t w = 0; w < n; ++w) {
    memcpy(job.codes + ((row + w) * job.shape.blocks + col) * 8, codes[w],
           static_cast<size_t>(depth) * 8);
    if (job.shape.square && !job.shape.gemm && (row + w) % kFp4Block != 0) continue;
    for (int64_t d = 0; d < depth; ++d) {
      job.scales[job.scale_index(row + w, col + d)] = scales[w][d];
    }
  }
}

void quantize_columns(const Job& job, const Input& x) {
  clear_padding(job);
  const int64_t strips = (job.shape.rows + kStrip - 1) / kStrip;
  const int64_t tiles = (job.shape.blocks + kDepth - 1) / kDepth;
  in_parallel(strips * tiles, kStrip * kDepth * kFp4Block, [&](int64_t task) {
    const int64_t row = task % strips * kStrip;
    const int64_t col = task / strips * kDepth;
    column_tile(job, x, row, std::min(kStrip, job.shape.rows - row), col,
                std::min(kDepth, job.shape.blocks - col));
  });
}

// ---------------------------------------------------------------------------------------- ops

struct Orientation {
  Output codes;
  Output scales;
  Tensor amax;
  Job job;

  Orientation(const Tensor& x, const Tensor& amax_any, const char* name, const Fp4Shape& shape,
              bool hadamard, const int64_t* rng, Place place)
      : codes(fp4_codes(x, shape, place)),
        scales(fp4_scales(x, shape, place)),
        amax(as_contiguous(amax_any)) {
    const bool per_row = fp4_amax_per_row(amax_any, name, x, "x", shape);
    job = {shape,
           hadamard,
           static_cast<const float*>(amax.const_data_ptr()),
           per_row,
           rng,
           codes.data<uint8_t>(),
           scales.data<uint8_t>()};
  }
};

// Seed and offset, copied out of the tensor.
struct Rng {
  int64_t values[2] = {0, 0};
  bool given;

  explicit Rng(const std::optional<Tensor>& rng) : given(rng.has_value()) {
    if (!given) return;
    const Tensor data = as_contiguous(*rng);
    memcpy(values, data.const_data_ptr(), sizeof(values));
  }
  const int64_t* data() const { return given ? values : nullptr; }
};

using Pair = std::tuple<Output, Output>;
using TwoPairs = std::tuple<Output, Output, Output, Output>;

Pair quantize_nvfp4(const Tensor& x, const Tensor& amax, int64_t block_m, int64_t block_k,
                    bool transposed, const std::string& layout, bool hadamard,
                    const std::optional<Tensor>& rng_any) {
  const Fp4Shape shape = fp4_shape(x, block_m, block_k, transposed, layout, hadamard);
  check_fp4_rng(rng_any, x);
  const Rng rng(rng_any);
  Orientation out(x, amax, "amax", shape, hadamard, rng.data(), place_of(x));
  const Input input(x);
  transposed ? quantize_columns(out.job, input) : quantize_rows(out.job, input);
  return {std::move(out.codes), std::move(out.scales)};
}

TwoPairs quantize_nvfp4_both(const Tensor& x, const Tensor& amax, const Tensor& amax_t, bool square,
                             const std::string& layout, bool hadamard,
                             const std::optional<Tensor>& rng_any) {
  const int64_t block = square ? kFp4Block : 1;
  const Fp4Shape along_k = fp4_shape(x, block, kFp4Block, false, layout, hadamard && square);
  const Fp4Shape along_m = fp4_shape(x, kFp4Block, block, true, layout, hadamard);
  check_fp4_rng(rng_any, x);
  const Rng rng(rng_any);
  const Place place = place_of(x);
  Orientation rows(x, amax, "amax", along_k, false, rng.data(), place);
  Orientation columns(x, amax_t, "amax_t", along_m, hadamard, rng.data(), place);
  const Input input(x);
  quantize_rows(rows.job, input);
  quantize_columns(columns.job, input);
  return {std::move(rows.codes), std::move(rows.scales), std::move(columns.codes),
          std::move(columns.scales)};
}

Output amax_hadamard(const Tensor& x_any, bool transposed) {
  check_fp4_input(x_any);
  check_fp4_multiple(x_any, transposed);
  Output amax = empty(nullptr, 0, dtype_codes().f32, place_of(x_any));
  const Input x(x_any);
  // Strips across, and what is 1 or 16 rows of x down.
  const int64_t across = transposed ? x.rows.cols : x.rows.cols / kFp4Block;
  const int64_t down = transposed ? x.rows.rows / kFp4Block : x.rows.rows;
  std::vector<float> partial(static_cast<size_t>(down), 0.0f);
  in_parallel(down, x.rows.cols * (transposed ? kFp4Block : 1), [&](int64_t task) {
    Fp4Elements elements;
    float best[kStrip] = {};
    for (int64_t first = 0; first < across; first += kStrip) {
      const int64_t n = std::min(kStrip, across - first);
      if (transposed) {
        x.typed->load_columns(x.at(task * kFp4Block, first), x.rows.stride, n, elements);
      } else {
        x.typed->load_rows(x.at(task, first * kFp4Block), n, elements);
      }
      loops().hadamard(elements, n);
      loops().raise_amax(elements, n, best);
    }
    partial[static_cast<size_t>(task)] = *std::max_element(best, best + kStrip);
  });
  float best = 0.0f;
  for (const float value : partial) best = std::max(best, value);
  *amax.data<float>() = best;
  return amax;
}

Output dequantize_nvfp4(const Tensor& codes_any, const Tensor& scales_any, const Tensor& amax_any,
                        int64_t block_m, int64_t block_k, ScalarType dtype,
                        const std::string& layout) {
  const Fp4Shape shape = fp4_codes_shape(codes_any, scales_any, block_m, block_k, layout);
  const Float out = float_dtype(dtype);
  Fp4Shape rows = shape;
  rows.square = false;  // here an amax a row makes sense for square blocks too
  const bool per_row = fp4_amax_per_row(amax_any, "amax", codes_any, "codes", rows);
  const Tensor codes = as_contiguous(codes_any);
  const Tensor scales = as_contiguous(scales_any);
  const Tensor amax = as_contiguous(amax_any);
  Output y = fp4_output(codes_any, shape, shape.blocks * kFp4Block, code_of(out),
                        place_of(codes_any));
  const auto* code_data = static_cast<const uint8_t*>(codes.const_data_ptr());
  const auto* scale_data = static_cast<const uint8_t*>(scales.const_data_ptr());
  const auto* amax_data = static_cast<const float*>(amax.const_data_ptr());
  const Job job{shape, false, amax_data, per_row, nullptr, nullptr, nullptr};
  const Fp4TypedLoops& typed = loops_of(loops(), out);
  const int64_t item = item_size(out);
  char* target = y.data<char>();
  in_parallel(shape.rows, shape.blocks * kFp4Block, [&](int64_t row) {
    uint8_t scale[kStrip];
    float whole[kStrip];
    float factor[kStrip];
    std::fill(whole, whole + kStrip, amax_data[per_row ? row : 0]);
    for (int64_t col = 0; col < shape.blocks; col += kStrip) {
      const int64_t n = std::min(kStrip, shape.blocks - col);
      const int64_t first = row * shape.blocks + col;
      for (int64_t w = 0; w < n; ++w) scale[w] = scale_data[job.scale_index(row, col + w)];
      loops().factors(scale, whole, n, factor);
      typed.dequantize(code_data + first * 8, factor, n, target + first * kFp4Block * item);
    }
  });
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CPU, m) {
  m.impl("quantize_nvfp4", ixt::Boxed<ixt::quantize_nvfp4>::call);
  m.impl("quantize_nvfp4_both", ixt::Boxed<ixt::quantize_nvfp4_both>::call);
  m.impl("amax_hadamard", ixt::Boxed<ixt::amax_hadamard>::call);
  m.impl("dequantize_nvfp4", ixt::Boxed<ixt::dequantize_nvfp4>::call);
}
