// What is known of large blocks, and the workspaces of matrix products.
#include <cstring>
#include "allocator.h"

namespace testdevice {

// ---- known contents

struct Fill { size_t nbytes; int byte; };
static std::map<const char*, Fill> fills;  // of large blocks only
constexpr size_t kLargeFill = 8 * kMiB;

bool known_fill(const void* address, size_t nbytes, int byte) {
  auto found = fills.find(static_cast<const char*>(address));
  return found != fills.end() && found->second.nbytes == nbytes && found->second.byte == byte;
}
void set_known_fill(const void* address, size_t nbytes, int byte) {
  unset_known_fill(address, nbytes);
  if (nbytes >= kLargeFill) fills[static_cast<const char*>(address)] = Fill{nbytes, byte};
}
void unset_known_fill(const void* address, size_t nbytes) {
  auto* start = static_cast<const char*>(address);
  for (auto it = fills.begin(); it != fills.end();) {
    bool apart = start + nbytes <= it->first || it->first + it->second.nbytes <= start;
    it = apart ? std::next(it) : fills.erase(it);
  }
}

// ---- workspaces

static std::vector<int> idle_handles;
static int handles = 0;
struct Handle {  // of a thread; when that ends, another thread gets it
  int number = -1;
  ~Handle() {
    Lock lock(mutex);
    if (number >= 0) idle_handles.push_back(number);
  }
};
static std::map<std::pair<int, Stream*>, c10::DataPtr> workspaces;

static size_t workspace_nbytes() {  // ":SIZE:COUNT" pairs in KiB; cuBLAS's choice on Hopper is 32 MiB
  const char* config = getenv("CUBLAS_WORKSPACE_CONFIG");
  size_t nbytes = 0;
  unsigned long size, count;
  for (const char* at = config; at && sscanf(at, ":%lu:%lu", &size, &count) == 2;) {
    nbytes += (size << 10) * count;
    at = strchr(at + 1, ':');
    at = at ? strchr(at + 1, ':') : nullptr;
  }
  return config ? nbytes : 32 * kMiB;
}
void take_workspace(Stream& s) {
  static thread_local Handle handle;
  if (handle.number < 0) {
    if (idle_handles.empty()) handle.number = handles++;
    else { handle.number = idle_handles.back(); idle_handles.pop_back(); }
  }
  size_t nbytes = workspace_nbytes();
  auto& held = workspaces[{handle.number, &s}];
  if (!held.get() && nbytes) held = allocator().allocate(nbytes);
}
void clear_workspaces() {
  Lock lock(mutex);
  workspaces.clear();
}

}  // namespace testdevice
