// A matrix of any strides as a larger contiguous one, zeros behind its rows and columns.
//
// The op is private: inductor_ext/ops/_pad.py calls it, and holds the same in PyTorch.
#include "common.cuh"

namespace ixt {
namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // of a row of the result, that a thread writes

struct PadArgs {
  const void* x;
  uint4* y;
  int64_t rows, cols;      // of x
  int64_t row_step, step;  // of x, in elements
  int64_t chunks;          // of 16 bytes, in all
  int64_t row_chunks;      // and in a row of y
  bool narrow;             // whether 32 bits count the chunks
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

template <typename T>
__global__ void __launch_bounds__(kThreads) pad(const PadArgs a) {
  constexpr int N = kBytes / sizeof(T);
  const int64_t chunk = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (chunk >= a.chunks) return;
  const int64_t row = a.narrow ? static_cast<uint32_t>(chunk) / static_cast<uint32_t>(a.row_chunks)
                               : chunk / a.row_chunks;
  const int64_t at = (chunk - row * a.row_chunks) * N;
  uint4 made{};
  if (row < a.rows && at < a.cols) {
    const T* from = static_cast<const T*>(a.x) + row * a.row_step;
    if (sizeof(T) == 1 && a.step == 1) {
      made = packed_bytes(reinterpret_cast<const uint8_t*>(from), at, a.cols);
    } else {
      T elements[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        elements[i] = at + i < a.cols ? __ldg(from + (at + i) * a.step) : T{};
      }
      memcpy(&made, elements, kBytes);
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
  IXT_CHECK(one, "`matrix` must be float32, of 16 bits or of 8, got ", dtype_name(code));
  return 1;
}

Output padded(const Tensor& matrix, int64_t rows, int64_t columns) {
  const int32_t code = dtype_code(matrix);
  const int64_t element = bytes_of(code);
  IXT_CHECK(matrix.dim() == 2, "`matrix` must have 2 dimensions, got ", matrix.dim());
  IXT_CHECK(rows >= matrix.size(0), "`rows` must be at least ", matrix.size(0), ", got ", rows);
  IXT_CHECK(columns >= matrix.size(1) && columns * element % kBytes == 0,
            "`columns` must be at least ", matrix.size(1), " and fill 16 bytes, got ", columns);
  const Place place = place_of(matrix);
  const DeviceScope scope(place.index);
  const int64_t shape[2] = {rows, columns};
  Output made = empty(shape, 2, code, place);
  PadArgs a{};
  a.x = matrix.const_data_ptr();
  a.y = made.data<uint4>();
  a.rows = matrix.size(0);
  a.cols = matrix.size(1);
  a.row_step = matrix.strides()[0];
  a.step = matrix.strides()[1];
  a.row_chunks = columns * element / kBytes;
  a.chunks = rows * a.row_chunks;
  a.narrow = a.chunks <= 0xFFFFFFFFll;
  if (a.chunks == 0) return made;
  const int64_t blocks = (a.chunks + kThreads - 1) / kThreads;
  IXT_CHECK(blocks <= 0x7FFFFFFF, "`rows` must be fewer, got ", rows);
  auto* kernel = element == 1 ? pad<uint8_t> : pad<uint16_t>;
  if (element == 4) kernel = pad<uint32_t>;
  launch(kernel, blocks, kThreads, current_stream(place.index), false, a);
  return made;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("_pad", ixt::Boxed<ixt::padded>::call);
}
