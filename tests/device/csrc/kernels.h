// Kernels: every operator is run by the CPU's kernel on the same bytes, in the order of its stream.
//
// A kernel reads at its launch, when all that its stream waits for has been run, and its results appear when
// something waits for them. What it reads and writes goes to the race detector.
#pragma once
#include <ATen/ATen.h>
#include "streams.h"

namespace testdevice {

at::Tensor as_cpu(const at::Tensor& t);  // the same memory, as the CPU sees it; holds no reference
bool on_device(const at::Tensor& t);

}  // namespace testdevice
