#include "pinned.h"
#include "races.h"

namespace testdevice {

static std::map<char*, size_t> registered;

static bool overlaps(char* p, size_t nbytes) {
  auto it = registered.lower_bound(p + nbytes);
  return it != registered.begin() && p < std::prev(it)->first + std::prev(it)->second;
}
bool is_pinned(const void* address) {
  Lock lock(mutex);
  return overlaps(static_cast<char*>(const_cast<void*>(address)), 1);
}
int pin(void* address, size_t nbytes) {
  Lock lock(mutex);
  if (overlaps(static_cast<char*>(address), nbytes)) return 712;
  registered[static_cast<char*>(address)] = nbytes;
  return 0;
}
int unpin(void* address) {
  Lock lock(mutex);
  auto found = registered.find(static_cast<char*>(address));
  if (found == registered.end()) return 713;
  forget(address, found->second);
  registered.erase(found);
  return 0;
}

// A freed block is not reused, and waits for the copies that were issued before: they may still read or write it.
struct PinnedAllocator final : c10::Allocator {
  static void deleter(void* p) {
    Lock lock(mutex);
    for (Stream* s : all_streams(-1)) drain(*s);
    unpin(p);
    ::free(p);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (!nbytes) return {nullptr, cpu};
    void* p = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    pin(p, nbytes);
    return {p, p, &deleter, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};
c10::Allocator& pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return *made;
}

}  // namespace testdevice
