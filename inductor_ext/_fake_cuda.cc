// A CUDA device that is not there, for code generation only (see fake_gpu.py).
//
// Autograd traces a training graph on the device of its tensors, so two C++ hooks must answer for
// "cuda" on a machine without one: the device guard (how many devices, which is current) and the
// CUDA hooks (is CUDA built, which device is current).  Nothing is ever launched or allocated.
//
// fake_cuda_install() puts both in place, fake_cuda_restore() puts the old ones back.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr size_t kCUDA = static_cast<size_t>(DeviceType::CUDA);

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int = 0) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct FakeHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  bool isPinnedPtr(const void*) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

// libtorch keeps the hooks object in a function-local static that was filled at the first use of
// CUDA state, long before us, so registering a second class comes too late.  FakeHooks adds no
// data members: lending its vtable to the live object is enough, and can be undone.
void* saved_vtable = nullptr;
const c10::impl::DeviceGuardImplInterface* saved_guard = nullptr;

void*& vtable_of(const at::CUDAHooksInterface& hooks) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks));
}

}  // namespace

extern "C" void fake_cuda_install() {
  static FakeGuard guard;
  static FakeHooks hooks;
  if (saved_vtable) return;
  auto& slot = vtable_of(at::detail::getCUDAHooks());
  saved_vtable = slot;
  slot = vtable_of(hooks);
  saved_guard = c10::impl::device_guard_impl_registry[kCUDA].exchange(&guard);
}

extern "C" void fake_cuda_restore() {
  if (!saved_vtable) return;
  c10::impl::device_guard_impl_registry[kCUDA].store(saved_guard);
  vtable_of(at::detail::getCUDAHooks()) = saved_vtable;
  saved_vtable = nullptr;
}
