// Find accesses to memory that no event orders, as a race detector with vector clocks does.
//
// For each span of device or pinned memory: the launch that wrote it last, and the launches that have read it
// since. A later access must come after them by the order of its stream, by an event that its stream waited for,
// or by the host's waiting. It does not matter in which order the work has run, so a race is found at each run.
//
// Limits: a strided tensor counts as all bytes between its first and its last; what the CPU reads and writes is
// not seen (its wrong numbers are, since copies run late); the host's threads count as one.
#pragma once
#include <string>
#include <vector>
#include "streams.h"

namespace testdevice {

void accessed(const void* address, size_t nbytes, bool write, const Stream& s, const std::string& name);
void forget(const void* address, size_t nbytes);  // the memory goes back to the system
std::vector<std::string> take_races();

}  // namespace testdevice
