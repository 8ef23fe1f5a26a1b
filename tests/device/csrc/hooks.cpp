// What ATen asks of a CUDA build: versions, pinned memory, generators, the current device.
#include <ATen/detail/CUDAHooksInterface.h>
#include "allocator.h"
#include "generators.h"
#include "pinned.h"
#include "streams.h"

namespace testdevice {

constexpr long kCuDNN = 91900;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return visible_devices() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return kCuDNN; }
  long versionRuntimeCuDNN() const override { return kCuDNN; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d = -1) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d = -1) const override {
    return at::make_generator<Generator>(d < 0 ? testdevice::current_device : d);
  }
  at::Device getDeviceFromPtr(void* p) const override {
    int device = device_of(p);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return at::Device(at::kCUDA, device);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  c10::DeviceIndex deviceCount() const override { return visible_devices(); }
  int getNumGPUs() const override { return visible_devices(); }
  c10::DeviceIndex current_device() const override { return testdevice::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return testdevice::current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchangeDevice(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    TORCH_CHECK(d < visible_devices(), "CUDA error: invalid device ordinal");
    auto before = testdevice::current_device;
    if (d >= 0) testdevice::current_device = d;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  void deviceSynchronize(c10::DeviceIndex d) const override {
    Lock lock(mutex);
    synchronize_device(d, "device");
  }
};
}  // namespace testdevice

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", testdevice::Hooks);
}
