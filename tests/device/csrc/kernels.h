// Kernels: every operator is run by the CPU's kernel on the same bytes, in the order of its stream.
//
// A kernel reads at its launch, when all that its stream waits for has been run, and its results appear when
// something waits for them. What it reads and writes goes to the race detector.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include "streams.h"

namespace testdevice {

at::Tensor as_cpu(const at::Tensor& t);  // the same memory, as the CPU sees it; holds no reference
bool on_device(const at::Tensor& t);

// Below autograd, autocast, functionalization and Python's modes.
struct Below {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard others{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
       c10::DispatchKey::AutocastCUDA, c10::DispatchKey::AutocastCPU})};
};

struct Extent {  // from the first byte of a tensor to its last
  const char* start;
  size_t nbytes;
};
Extent extent_of(const at::Tensor& t);
void touch(const Extent& e, bool write, Stream& s, const std::string& name);
// The bytes appear at their place when something waits for the stream.
void publish(Stream& s, const at::Tensor& place, const at::Tensor& made);
// What a kernel takes by the bytes and float operations of its tensors.
double seconds_of(const std::string& name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written);

// Operators that do not go through the CPU's kernel of that name.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking);
at::Tensor& fill_(at::Tensor& self, const at::Scalar& value);
at::Tensor& zero_(at::Tensor& self);
at::Scalar local_scalar(const at::Tensor& t);

}  // namespace testdevice
