// Products with quantized weights on CUDA: what the kernels rely on, allocation, registration.
//
// The op is private: inductor_ext/ops/weight_only.py has checked shapes, dtypes and devices, and
// made every tensor contiguous and aligned to 16 bytes.
#include <optional>

#include "common.cuh"
#include "weights.h"

namespace ixt {
namespace {

Code code_named(const std::string& kind) {
  if (kind == "int8") return Code::int8;
  if (kind == "e4m3") return Code::e4m3;
  if (kind == "e5m2") return Code::e5m2;
  if (kind == "int4") return Code::int4;
  IXT_CHECK(kind == "e2m1", "`kind` must be int8, e4m3, e5m2, int4 or e2m1, got ", kind);
  return Code::e2m1;
}

// log2 of a power of two up to 256; 30 for 0, which stands for all of them.
int shift_of(int64_t size, const char* name) {
  if (size == 0) return 30;
  int shift = 0;
  while (shift < 8 && int64_t{1} << shift < size) ++shift;
  IXT_CHECK(int64_t{1} << shift == size, "`", name, "` must be a power of two, got ", size);
  return shift;
}

const void* data_of(const std::optional<Tensor>& t, const char* name) {
  if (!t) return nullptr;
  IXT_CHECK(t->is_contiguous() && aligned16(t->const_data_ptr()), "`", name,
            "` must be contiguous and aligned to 16 bytes");
  return t->const_data_ptr();
}

Output weight_only_decode(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& bias,
                          const std::string& kind, const std::optional<Tensor>& scale,
                          const std::optional<Tensor>& packed, const std::optional<Tensor>& last,
                          int64_t group, int64_t rows) {
  const Code code = code_named(kind);
  const int bits = code == Code::int4 || code == Code::e2m1 ? 4 : 8;
  const Float dtype = float_dtype(x, "x");
  IXT_CHECK(dtype != Float::f32, "`x` must be bfloat16 or float16, got float32");
  IXT_CHECK(x.dim() == 2 && codes.dim() == 2, "`x` and `codes` must have 2 dimensions");
  const int64_t m = x.size(0), k = x.size(1), n = codes.size(0);
  IXT_CHECK(m >= 1 && m <= kMostRows, "`x` must have 1 to 16 rows, got ", m);
  IXT_CHECK(k >= 1 && k * bits % 128 == 0 && codes.size(1) * 8 == k * bits && k < 1 << 30,
            "`codes` must have rows of ", k, " codes, a multiple of 16 bytes");
  IXT_CHECK(n >= 1 && n < 1 << 30, "`codes` must have 1 to 2^30 rows, got ", n);
  IXT_CHECK(!scale || scale->numel() < 1 << 30, "`scale` must have fewer than 2^30 elements");
  IXT_CHECK(!packed || packed->numel() < 1 << 30, "`packed` must have fewer than 2^30 elements");
  const Place place = place_of(x);
  const DeviceScope scope(place.index);
  const std::array<int64_t, 2> shape{m, n};
  Output y = empty(shape.data(), 2, code_of(dtype), place);
  DecodeArgs a{};
  a.x = data_of(x, "x");
  a.codes = static_cast<const uint8_t*>(data_of(codes, "codes"));
  a.scale = static_cast<const float*>(data_of(scale, "scale"));
  a.packed = static_cast<const uint8_t*>(data_of(packed, "packed"));
  a.last = static_cast<const float*>(data_of(last, "last"));
  a.bias = data_of(bias, "bias");
  a.y = y.data();
  a.packed_bytes = packed ? static_cast<int>(packed->numel()) : 0;
  a.m = static_cast<int>(m);
  a.n = static_cast<int>(n);
  a.k = static_cast<int>(k);
  a.group_shift = shift_of(group, "group");
  a.row_shift = shift_of(rows, "rows");
  a.groups = group ? static_cast<int>((k + group - 1) / group) : 1;
  a.last_per_row = last && last->numel() != 1;
  const Target target{place.index, current_stream(place.index)};
  switch (code) {
    case Code::int8: launch_decode_int8(a, dtype, target); break;
    case Code::e4m3: launch_decode_e4m3(a, dtype, target); break;
    case Code::e5m2: launch_decode_e5m2(a, dtype, target); break;
    case Code::int4: launch_decode_int4(a, dtype, target); break;
    case Code::e2m1: launch_decode_e2m1(a, dtype, target); break;
  }
  return y;
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("_weight_only_decode", ixt::Boxed<ixt::weight_only_decode>::call);
}
