// Pinned host memory: what torch allocates as such, and what is registered with cudaHostRegister.
#pragma once
#include <c10/core/Allocator.h>

namespace testdevice {

bool is_pinned(const void* address);
int pin(void* address, size_t nbytes);  // cudaError_t: 0, or 712 if a part is registered already
int unpin(void* address);               // 0, or 713 if it is not registered
c10::Allocator& pinned_allocator();

}  // namespace testdevice
