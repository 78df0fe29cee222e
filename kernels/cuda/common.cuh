// Host and device helpers of all CUDA kernels: stream, device, launch, vectors, reductions.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>

#include "../common/op_args.h"

namespace ixt {

constexpr int kWarp = 32;

// ---------------------------------------------------------------------------------------- host

inline void check_cuda(cudaError_t status, const char* what) {
  if (__builtin_expect(status == cudaSuccess, 1)) return;
  (void)cudaGetLastError();  // an error of a launch must not surface again at the next one
  fail("CUDA error in ", what, ": ", cudaGetErrorString(status),
       status == cudaErrorNoKernelImageForDevice
           ? " (rebuild inductor_ext with INDUCTOR_EXT_CUDA_ARCHS for this GPU)"
           : "");
}

// PyTorch's current stream. torch loads libtorch_cuda with RTLD_LOCAL, and a CPU build of torch
// has none, so the symbol is looked up in the loaded library instead of being linked.
inline cudaStream_t current_stream(int device) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Getter>(symbol);
  }();
  IXT_CHECK(getter != nullptr, "this build of torch has no CUDA support");
  void* stream = nullptr;
  IXT_CHECK(getter(device, &stream) == 0, "could not get the current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// Makes `device` current while in scope; free of charge when it already is.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    switched_ = previous_ != device;
    if (switched_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (switched_) (void)cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

// Whether the device and the code that it loads both have programmatic dependent launch. Asked once
// a device; `kernel` is any kernel of the calling file.
template <typename Kernel>
bool can_overlap(int device, Kernel* kernel) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> answers[kMaxDevices];  // 0: not asked yet, 1: no, 2: yes
  IXT_CHECK(device >= 0 && device < kMaxDevices, "device index must be below 64, got ", device);
  int answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes code{};
    const void* symbol = reinterpret_cast<const void*>(kernel);
    check_cuda(cudaFuncGetAttributes(&code, symbol), "kernel lookup");
    answer = code.ptxVersion >= 90 && code.binaryVersion >= 90 ? 2 : 1;
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

struct Grid {
  int64_t x;
  int64_t y = 1;
  Grid(int64_t x, int64_t y = 1) : x(x), y(y) {}  // NOLINT: a number is a grid of one row
};

// Launch and check. With `overlap`, the kernel may start before its predecessor in the stream
// ends; it then calls pdl_wait() before touching what the predecessor wrote.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), Grid blocks, int threads, cudaStream_t stream,
            bool overlap, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// -------------------------------------------------------------------------------------- device

// Let the next kernel of the stream start now.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the previous kernel of the stream has ended and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// An unsigned type of the given size, for one load or store.
template <int Bytes>
struct RawOf;
template <>
struct RawOf<1> { using type = unsigned char; };
template <>
struct RawOf<2> { using type = unsigned short; };
template <>
struct RawOf<4> { using type = unsigned int; };
template <>
struct RawOf<8> { using type = uint2; };
template <>
struct RawOf<16> { using type = uint4; };
template <int Bytes>
using Raw = typename RawOf<Bytes>::type;

// Max over the warp; valid for the bits of floats that are not negative and not NaN.
__device__ __forceinline__ float warp_max(float value) {
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(value)));
}

// Max over the block, in every thread. `shared` holds one float a warp.
__device__ __forceinline__ float block_max(float value, float* shared) {
  value = warp_max(value);
  const int warps = (blockDim.x + kWarp - 1) / kWarp;
  if (warps == 1) return value;
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_max(lane < warps ? shared[lane] : 0.0f);
}

}  // namespace ixt
