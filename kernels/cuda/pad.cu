// Matrices of any strides as larger contiguous ones, zeros behind their rows and columns.
//
// The op is private: inductor_ext/ops/_pad.py calls it, and holds the same in PyTorch.
#include "common.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // of a row of the result, that a thread writes

struct Matrix {
  const void* x;
  uint4* y;
  int64_t rows, cols;      // of x
  int64_t row_step, step;  // of x, in elements
  int64_t element;         // bytes
  int64_t chunks;          // of 16 bytes of y, in all
  int64_t row_chunks;      // and in a row
  int64_t first_block;
  bool narrow;  // whether 32 bits count the chunks
};

constexpr int kMost = 4;

struct PadArgs {
  Matrix matrix[kMost];
  int count;
};

// Bytes [at, at + 16) of a row that lies byte by byte, zeros behind `cols`. Memory is read in
// aligned words; of one that reaches beyond the row, byte by byte.
__device__ __forceinline__ uint4 packed_bytes(const uint8_t* row, int64_t at, int64_t cols) {
  const int count = cols - at < kBytes ? static_cast<int>(cols - at) : kBytes;  // at least 1
  const auto address = reinterpret_cast<uintptr_t>(row + at);
  const int skipped = static_cast<int>(address % 4);
  const auto* words = reinterpret_cast<const uint32_t*>(address - skipped);
  const int64_t left = skipped + cols - at;  // bytes of the row from the first word on
  uint32_t in[5]{}, out[4];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (4 * i + 4 <= left) {
      in[i] = __ldg(words + i);
    } else {
      const auto* bytes = reinterpret_cast<const uint8_t*>(words + i);
      for (int j = 0; j < left - 4 * i; ++j) in[i] |= static_cast<uint32_t>(bytes[j]) << (8 * j);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mine = count - 4 * i;
    const uint32_t mask = mine >= 4 ? 0xFFFFFFFFu : mine > 0 ? (1u << (8 * mine)) - 1 : 0;
    out[i] = __funnelshift_r(in[i], in[i + 1], 8 * skipped) & mask;
  }
  return {out[0], out[1], out[2], out[3]};
}

// The same of elements with steps between them.
template <typename T>
__device__ __forceinline__ uint4 gathered(const void* x, int64_t first, int64_t step, int64_t at,
                                          int64_t cols) {
  constexpr int N = kBytes / sizeof(T);
  const T* row = static_cast<const T*>(x) + first;
  T elements[N];
#pragma unroll
  for (int i = 0; i < N; ++i) elements[i] = at + i < cols ? __ldg(row + (at + i) * step) : T{};
  uint4 made;
  memcpy(&made, elements, kBytes);
  return made;
}

__global__ void __launch_bounds__(kThreads) pad(const __grid_constant__ PadArgs args) {
  int mine = 0;
  while (mine + 1 < args.count && blockIdx.x >= args.matrix[mine + 1].first_block) ++mine;
  const Matrix& a = args.matrix[mine];
  const int64_t chunk = (blockIdx.x - a.first_block) * kThreads + threadIdx.x;
  if (chunk >= a.chunks) return;
  const int64_t row = a.narrow ? static_cast<uint32_t>(chunk) / static_cast<uint32_t>(a.row_chunks)
                               : chunk / a.row_chunks;
  const int64_t at = (chunk - row * a.row_chunks) * (kBytes / a.element);
  uint4 made{};
  if (row < a.rows && at < a.cols) {
    const int64_t first = row * a.row_step;
    if (a.element == 1 && a.step == 1) {
      made = packed_bytes(static_cast<const uint8_t*>(a.x) + first, at, a.cols);
    } else if (a.element == 1) {
      made = gathered<uint8_t>(a.x, first, a.step, at, a.cols);
    } else if (a.element == 2) {
      made = gathered<uint16_t>(a.x, first, a.step, at, a.cols);
    } else {
      made = gathered<uint32_t>(a.x, first, a.step, at, a.cols);
    }
  }
  a.y[chunk] = made;
}

int64_t bytes_of(int32_t code) {
  const DtypeCodes& known = dtype_codes();
  if (code == known.f32) return 4;
  if (code == known.bf16 || code == known.f16) return 2;
  const bool one = code == known.e4m3 || code == known.e5m2 || code == aoti_torch_dtype_int8() ||
                   code == aoti_torch_dtype_uint8();
  IXT_CHECK(one, "`matrices` must be float32, of 16 bits or of 8, got ", dtype_name(code));
  return 1;
}

// What a matrix becomes; `a` is filled in but for its first block.
Tensor made_for(const Tensor& matrix, int64_t rows, int64_t columns, Place place, Matrix& a) {
  const int32_t code = dtype_code(matrix);
  a.element = bytes_of(code);
  IXT_CHECK(matrix.dim() == 2, "`matrices` must have 2 dimensions, got ", matrix.dim());
  const Place its = place_of(matrix);
  IXT_CHECK(its.type == place.type && its.index == place.index,
            "`matrices` must be on one device");
  IXT_CHECK(rows >= matrix.size(0), "`rows` must be at least ", matrix.size(0), ", got ", rows);
  IXT_CHECK(columns >= matrix.size(1) && columns * a.element % kBytes == 0,
            "`columns` must be at least ", matrix.size(1), " and fill 16 bytes, got ", columns);
  const int64_t shape[2] = {rows, columns};
  Output made = empty(shape, 2, code, place);
  a.x = matrix.const_data_ptr();
  a.y = made.data<uint4>();
  a.rows = matrix.size(0);
  a.cols = matrix.size(1);
  a.row_step = matrix.strides()[0];
  a.step = matrix.strides()[1];
  a.row_chunks = columns * a.element / kBytes;
  a.chunks = rows * a.row_chunks;
  a.narrow = a.chunks <= 0xFFFFFFFFll;
  return made.tensor();
}

std::vector<Tensor> padded(const std::vector<Tensor>& matrices, const std::vector<int64_t>& rows,
                           const std::vector<int64_t>& columns) {
  const size_t count = matrices.size();
  IXT_CHECK(count >= 1 && count <= kMost, "`matrices` must be 1 to 4, got ", count);
  IXT_CHECK(rows.size() == count && columns.size() == count,
            "`rows` and `columns` must have a number for each of ", count, " matrices");
  const Place place = place_of(matrices[0]);
  const DeviceScope scope(place.index);
  std::vector<Tensor> made;
  PadArgs args{};
  int64_t blocks = 0;
  for (size_t i = 0; i < count; ++i) {
    Matrix& a = args.matrix[i];
    made.push_back(made_for(matrices[i], rows[i], columns[i], place, a));
    a.first_block = blocks;
    blocks += (a.chunks + kThreads - 1) / kThreads;
  }
  args.count = static_cast<int>(count);
  IXT_CHECK(blocks <= 0x7FFFFFFF, "`matrices` must be smaller: ", blocks, " blocks of threads");
  if (blocks > 0) launch(pad, blocks, kThreads, current_stream(place.index), false, args);
  return made;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("_pad", ixt::Boxed<ixt::padded>::call);
}
