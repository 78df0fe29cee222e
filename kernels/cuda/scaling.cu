// Delayed scaling on CUDA: next history and scale, as results or in place.
#include <string>
#include <tuple>

#include "../common/int_args.h"
#include "fp8_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;

// Floats with strides: history (entries, tensors), scale (tensors).
struct UpdateArgs {
  const float* history;
  int64_t row;
  int64_t column;
  const float* scale;
  int64_t scale_step;
  float* new_history;
  int64_t new_row;
  int64_t new_column;
  float* new_scale;
  int64_t new_scale_step;
};

// A block updates one tensor's history. Entries are read before their places are written, so that
// both may be the same memory: a step reads [i + 1], writes [i], and never reads what was written.
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ UpdateArgs a, const __grid_constant__ ScaleUpdate u) {
  __shared__ float shared[kWarp];
  const float* from = a.history + blockIdx.x * a.column;
  float* to = a.new_history + blockIdx.x * a.new_column;
  const float last = u.length > 0 ? from[0] : 0.0f;
  float best = 0.0f;
  for (int64_t start = 0; start < u.length; start += kThreads) {
    const int64_t i = start + threadIdx.x;
    const float entry = i + 1 < u.length ? from[(i + 1) * a.row] : last;
    best = fmaxf(best, entry);  // ignores NaN
    __syncthreads();
    if (i < u.length) to[i * a.new_row] = i == 0 ? 0.0f : entry;
  }
  const float largest = block_max(best, shared);
  if (threadIdx.x != 0) return;
  const float amax = u.most_recent ? last : largest;
  const float old = a.scale[blockIdx.x * a.scale_step];
  a.new_scale[blockIdx.x * a.new_scale_step] = updated_scale(amax, u.largest, old);
}

void run(const ScaleUpdate& u, const UpdateArgs& args, Place place) {
  if (u.columns == 0) return;
  launch(update, u.columns, kThreads, current_stream(place.index), false, args, u);
}

UpdateArgs reading(const Tensor& history, const Tensor& scale) {
  const auto strides = history.strides();
  UpdateArgs args{};
  args.history = static_cast<const float*>(history.const_data_ptr());
  args.row = strides[0];
  args.column = history.dim() == 2 ? strides[1] : 0;
  args.scale = static_cast<const float*>(scale.const_data_ptr());
  args.scale_step = scale.dim() == 1 ? scale.strides()[0] : 0;
  return args;
}

std::tuple<Output, Output> update_fp8_scale(const Tensor& history, const Tensor& scale,
                                            ScalarType dtype, int64_t margin,
                                            const std::string& algorithm) {
  const ScaleUpdate u = check_scale_update(history, scale, dtype, margin, algorithm);
  const Place place = place_of(history);
  const DeviceScope scope(place.index);
  Output new_history = empty_like(history, dtype_codes().f32, place);
  Output new_scale = empty_like(scale, dtype_codes().f32, place);
  UpdateArgs args = reading(history, scale);
  args.new_history = new_history.data<float>();
  args.new_row = u.columns;
  args.new_column = 1;
  args.new_scale = new_scale.data<float>();
  args.new_scale_step = 1;
  run(u, args, place);
  return {std::move(new_history), std::move(new_scale)};
}

std::tuple<> update_fp8_scale_(const Tensor& history, const Tensor& scale, ScalarType dtype,
                               int64_t margin, const std::string& algorithm) {
  const ScaleUpdate u = check_scale_update(history, scale, dtype, margin, algorithm);
  check_not_expanded(history, "history");
  check_not_expanded(scale, "scale");
  const Place place = place_of(history);
  const DeviceScope scope(place.index);
  UpdateArgs args = reading(history, scale);
  args.new_history = static_cast<float*>(history.mutable_data_ptr());
  args.new_row = args.row;
  args.new_column = args.column;
  args.new_scale = static_cast<float*>(scale.mutable_data_ptr());
  args.new_scale_step = args.scale_step;
  run(u, args, place);
  return {};
}

}  // namespace
}  // namespace ixt

STABLE_TORCH_LIBRARY_IMPL(inductor_ext, CUDA, m) {
  m.impl("update_fp8_scale", ixt::Boxed<ixt::update_fp8_scale>::call);
  m.impl("update_fp8_scale_", ixt::Boxed<ixt::update_fp8_scale_>::call);
}
