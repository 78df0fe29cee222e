// What every op does on the host: dtypes, argument checks, shapes, allocation.
//
// Only PyTorch's stable C ABI is used, so one binary serves every torch from 2.11 on.
#pragma once

#ifndef TORCH_TARGET_VERSION
#error "the build sets TORCH_TARGET_VERSION; see kernels/CMakeLists.txt"
#endif

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "box.h"
#include "fp8.h"

namespace ixt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// An argument error; the words are those of inductor_ext/validation.py.
#define IXT_CHECK(cond, ...)                                   \
  do {                                                         \
    if (__builtin_expect(!(cond), 0)) ::ixt::fail(__VA_ARGS__); \
  } while (0)

// No streams: their numbers go through the locale's facets, and where a process holds two C++
// runtimes (one of them linked into some other library) those may be the other one's.
inline std::string text_of(const std::string& part) { return part; }
template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
std::string text_of(Integer part) {
  return std::to_string(part);
}
inline std::string text_of(double part) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", part);
  return text;
}

template <typename... Parts>
[[noreturn]] __attribute__((noinline, cold)) void fail(const Parts&... parts) {
  throw std::runtime_error((std::string() + ... + text_of(parts)));
}

// libtorch's own dtype numbers, asked once (they may differ from those of the headers).
struct DtypeCodes {
  int32_t f32 = aoti_torch_dtype_float32();
  int32_t f16 = aoti_torch_dtype_float16();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  int32_t e5m2 = aoti_torch_dtype_float8_e5m2();
};

inline const DtypeCodes& dtype_codes() {
  static const DtypeCodes codes;
  return codes;
}

inline int32_t dtype_code(const Tensor& t) {
  int32_t code = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

inline int32_t device_type(const Tensor& t) {
  int32_t type = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

inline std::string dtype_name(int32_t code) {
  const DtypeCodes& known = dtype_codes();
  if (code == known.f32) return "float32";
  if (code == known.f16) return "float16";
  if (code == known.bf16) return "bfloat16";
  if (code == known.e4m3) return "float8_e4m3fn";
  if (code == known.e5m2) return "float8_e5m2";
  if (code == aoti_torch_dtype_float64()) return "float64";
  if (code == aoti_torch_dtype_int64()) return "int64";
  if (code == aoti_torch_dtype_int32()) return "int32";
  if (code == aoti_torch_dtype_int16()) return "int16";
  if (code == aoti_torch_dtype_int8()) return "int8";
  if (code == aoti_torch_dtype_uint8()) return "uint8";
  if (code == aoti_torch_dtype_bool()) return "bool";
  return "dtype number " + std::to_string(code);
}

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string shape_text(const Tensor& t) { return shape_text(t.sizes()); }

enum class Float { f32, f16, bf16 };
enum class Fp8 { e4m3, e5m2 };

inline std::string dtype_name(ScalarType dtype) {
  return dtype_name(torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)));
}

inline Float float_dtype(const Tensor& t, const char* name) {
  const int32_t code = dtype_code(t);
  const DtypeCodes& known = dtype_codes();
  if (code == known.bf16) return Float::bf16;
  if (code == known.f16) return Float::f16;
  if (code == known.f32) return Float::f32;
  fail("`", name, "` must be bfloat16, float16 or float32, got ", dtype_name(code));
}

inline Float float_dtype(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return Float::bf16;
  if (dtype == ScalarType::Half) return Float::f16;
  if (dtype == ScalarType::Float) return Float::f32;
  fail("`dtype` must be bfloat16, float16 or float32, got ", dtype_name(dtype));
}

inline Fp8 fp8_dtype(const Tensor& t, const char* name) {
  const int32_t code = dtype_code(t);
  if (code == dtype_codes().e4m3) return Fp8::e4m3;
  if (code == dtype_codes().e5m2) return Fp8::e5m2;
  fail("`", name, "` must be float8_e4m3fn or float8_e5m2, got ", dtype_name(code));
}

inline Fp8 fp8_dtype(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return Fp8::e4m3;
  if (dtype == ScalarType::Float8_e5m2) return Fp8::e5m2;
  fail("`dtype` must be float8_e4m3fn or float8_e5m2, got ", dtype_name(dtype));
}

inline int32_t code_of(Fp8 format) {
  return format == Fp8::e4m3 ? dtype_codes().e4m3 : dtype_codes().e5m2;
}

inline int32_t code_of(Float dtype) {
  const DtypeCodes& known = dtype_codes();
  return dtype == Float::bf16 ? known.bf16 : dtype == Float::f16 ? known.f16 : known.f32;
}

inline float max_finite(Float dtype) {
  if (dtype == Float::bf16) return bit_copy<float>(0x7F7F0000u);
  return dtype == Float::f16 ? 65504.0f : kFloatMax;
}

// Where a new tensor goes.
struct Place {
  int32_t type;
  int32_t index;
};

inline Place place_of(const Tensor& t) { return {device_type(t), t.get_device_index()}; }

// Allocate through the shim, which is several times cheaper than a call through the dispatcher.
inline Output empty(const int64_t* sizes, int64_t rank, int32_t dtype, Place place) {
  std::array<int64_t, 8> fixed{};
  std::vector<int64_t> heap;
  int64_t* strides = fixed.data();
  if (rank > static_cast<int64_t>(fixed.size())) {
    heap.resize(rank);
    strides = heap.data();
  }
  int64_t step = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes, strides, dtype, place.type, place.index, &handle));
  return Output(handle);
}

inline Output empty_like(const Tensor& t, int32_t dtype, Place place) {
  const auto sizes = t.sizes();
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), dtype, place);
}

// fp32, shape (*t.shape[:-1], 1).
inline Output empty_per_row(const Tensor& t, Place place) {
  const auto sizes = t.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = 1;
  return empty(shape.data(), static_cast<int64_t>(shape.size()), dtype_codes().f32, place);
}

// `t` as (rows, cols) with unit stride inside a row and one stride between rows.
struct Rows {
  Tensor tensor;  // owns the data
  int64_t rows;
  int64_t cols;
  int64_t stride;  // elements from a row to the next
};

inline int64_t row_count(const Tensor& t) {
  const auto sizes = t.sizes();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

// Copies only when the rows cannot be reached with one stride.
inline Rows as_rows(const Tensor& t) {
  const auto sizes = t.sizes();
  const int64_t rank = static_cast<int64_t>(sizes.size());
  const int64_t rows = row_count(t);
  const int64_t cols = sizes[rank - 1];
  if (t.is_contiguous()) return {t, rows, cols, cols};
  const auto strides = t.strides();
  bool direct = cols <= 1 || strides[rank - 1] == 1;
  int64_t stride = cols;
  int64_t expected = -1;  // stride that the next outer dimension must have
  for (int64_t i = rank - 2; direct && i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (expected < 0) {
      stride = strides[i];
    } else {
      direct = strides[i] == expected;
    }
    expected = strides[i] * sizes[i];
  }
  if (direct) return {t, rows, cols, stride};
  return {torch::stable::contiguous(t), rows, cols, cols};
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

enum class Grain { tensor, row };

// Check a scale against the tensor it belongs to and say what it scales.
inline Grain scale_grain(const Tensor& scale, const char* name, const Tensor& x, Place place) {
  IXT_CHECK(dtype_code(scale) == dtype_codes().f32, "`", name, "` must be float32, got ",
            dtype_name(dtype_code(scale)));
  const Place other = place_of(scale);
  IXT_CHECK(other.type == place.type && other.index == place.index, "`", name,
            "` must be on the device of the tensor it scales, got another device");
  const auto xs = x.sizes();
  const auto ss = scale.sizes();
  if (scale.numel() == 1) return Grain::tensor;
  bool ok = !xs.empty() && ss.size() == xs.size() && ss[ss.size() - 1] == 1;
  for (size_t i = 0; ok && i + 1 < xs.size(); ++i) ok = ss[i] == xs[i];
  IXT_CHECK(ok, "`", name, "` must have 1 element or a scale a row, shape (*shape[:-1], 1), got ",
            shape_text(scale), " for a tensor of shape ", shape_text(x));
  return Grain::row;
}

inline ScaleRule scale_rule(double eps, bool pow2, float overflow) {
  constexpr double largest = std::numeric_limits<float>::max();
  IXT_CHECK(eps >= 0.0 && eps <= largest, "`eps` must be at least 0 and at most ", largest,
            ", got ", eps);
  return {static_cast<float>(eps), overflow, pow2};
}

}  // namespace ixt
