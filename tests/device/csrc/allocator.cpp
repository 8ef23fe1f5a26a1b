#include "allocator.h"
#include <c10/core/AllocatorConfig.h>
#include <sys/mman.h>
#include <cstring>
#include "races.h"

namespace testdevice {

static bool expandable() { return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(); }
char* map_pages(size_t nbytes) {
  void* p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(p != MAP_FAILED, "the test device cannot map ", nbytes, " bytes");
  return static_cast<char*>(p);
}
bool DeviceMemory::should_split(const Block& block, size_t size) const {
  size_t left = block.size - size;
  return left >= (block.pool->small || block.segment ? 512 : kMiB + 1);
}

BlockPool& DeviceMemory::pool_for(size_t size, const Stream& s) {
  for (auto& [id, takes] : routes_)
    if (takes(s)) {
      auto& pool = *private_.at(id);
      return size <= kMiB ? pool.small : pool.large;
    }
  return size <= kMiB ? small_ : large_;
}

Block* DeviceMemory::find_free(BlockPool& pool, Stream& s, size_t size) {
  Block key{device_, &s, &pool, nullptr, size};
  auto it = pool.blocks.lower_bound(&key);
  if (it == pool.blocks.end() || (*it)->stream != &s) return nullptr;
  if ((*it)->segment) {  // rather one that need not grow further
    auto span = [](Block* b) { return b->size + (b->next && !b->next->mapped ? b->next->size : 0); };
    for (auto next = std::next(it); next != pool.blocks.end() && (*next)->stream == &s; ++next)
      if (span(*next) < span(*it)) it = next; else break;
  }
  Block* found = *it;
  pool.blocks.erase(it);
  return found;
}

Block* DeviceMemory::new_segment(BlockPool& pool, Stream& s, size_t size) {
  size_t nbytes = size <= kMiB ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : rounded_up(size, 2 * kMiB);
  if (reserved + nbytes > limit) return nullptr;
  auto* made = new Block{device_, &s, &pool, map_pages(nbytes), nbytes};
  reserved += nbytes;
  if (pool.owner) pool.owner->segments++;
  stats.num_device_alloc++;
  both(stats, pool, [&](Stats& t, size_t i) { t.segment[i].increase(1); t.reserved_bytes[i].increase(nbytes); });
  return made;
}

// ---- blocks

size_t DeviceMemory::merge(Block* into, Block* other) {
  if (!other || other->allocated || other->pending || !other->used_by.empty() || other->mapped != into->mapped)
    return 0;
  if (into->prev == other) {
    into->ptr = other->ptr;
    into->prev = other->prev;
    if (into->prev) into->prev->next = into;
  } else {
    into->next = other->next;
    if (into->next) into->next->prev = into;
  }
  size_t nbytes = other->size;
  into->size += nbytes;
  (other->mapped ? static_cast<void>(into->pool->blocks.erase(other))
                 : static_cast<void>(into->pool->unmapped.erase(other)));
  delete other;
  return nbytes;
}

// Free parts of split segments cannot be given back; torch does not count those of expandable segments.
void DeviceMemory::count_inactive(const Block& block, bool more) {
  if (!block.is_split() || block.segment) return;
  both(stats, *block.pool, [&](Stats& t, size_t i) {
    more ? t.inactive_split[i].increase(1) : t.inactive_split[i].decrease(1);
    more ? t.inactive_split_bytes[i].increase(block.size) : t.inactive_split_bytes[i].decrease(block.size);
  });
}

Block* DeviceMemory::malloc(size_t nbytes, Stream& s) {
  process_pending();
  size_t size = std::max<size_t>(512, rounded_up(nbytes, 512));
  BlockPool& pool = pool_for(size, s);
  auto fresh = [&] { return expandable() ? grow(pool, s, size) : new_segment(pool, s, size); };
  Block* block = find_free(pool, s, size);
  bool was_free = block;
  if (!block) block = fresh();
  if (!block && routes_.empty()) {
    stats.num_alloc_retries++;
    empty_cache();
    block = fresh();
  }
  if (!block) out_of_memory(nbytes);
  if (was_free) count_inactive(*block, false);
  if (should_split(*block, size)) {
    auto* rest = new Block{device_, &s, &pool, block->ptr + size, block->size - size};
    rest->segment = block->segment;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = size;
    pool.blocks.insert(rest);
    count_inactive(*rest, true);
  }
  block->allocated = true;
  block->requested = nbytes;
  live.insert(block);
  both(stats, pool, [&](Stats& t, size_t i) {
    t.allocation[i].increase(1);
    t.allocated_bytes[i].increase(block->size);
    t.requested_bytes[i].increase(nbytes);
    t.active[i].increase(1);
    t.active_bytes[i].increase(block->size);
  });
  return block;
}

void DeviceMemory::free(Block* block) {
  block->allocated = false;
  both(stats, *block->pool, [&](Stats& t, size_t i) {
    t.allocation[i].decrease(1);
    t.allocated_bytes[i].decrease(block->size);
    t.requested_bytes[i].decrease(block->requested);
  });
  if (block->used_by.empty()) return return_block(block);
  if (!routes_.empty()) return deferred_.push_back(block);
  for (Stream* s : std::exchange(block->used_by, {})) {
    block->pending++;
    pending_.emplace_back(record(*s), block);
  }
}

void DeviceMemory::process_pending() {
  if (!routes_.empty()) return;
  for (Block* block : std::exchange(deferred_, {}))
    for (Stream* s : std::exchange(block->used_by, {})) {
      block->pending++;
      pending_.emplace_back(record(*s), block);
    }
  for (size_t i = 0; i < pending_.size();) {
    auto [event, block] = pending_[i];
    if (!query(event)) { i++; continue; }
    pending_.erase(pending_.begin() + i);
    if (--block->pending == 0) return_block(block);
  }
}

void DeviceMemory::return_block(Block* block) {
  live.erase(block);
  both(stats, *block->pool, [&](Stats& t, size_t i) {
    t.active[i].decrease(1);
    t.active_bytes[i].decrease(block->size);
  });
  for (Block* other : {block->prev, block->next})
    if (other && !other->allocated && !other->pending && other->used_by.empty() && other->mapped)
      count_inactive(*other, false);
  merge(block, block->prev);
  merge(block, block->next);
  block->requested = 0;
  block->pool->blocks.insert(block);
  count_inactive(*block, true);
}

void DeviceMemory::release(Block* block) {
  reserved -= block->size;
  stats.num_device_free++;
  if (block->pool->owner) block->pool->owner->segments--;
  both(stats, *block->pool, [&](Stats& t, size_t i) {
    t.segment[i].decrease(1);
    t.reserved_bytes[i].decrease(block->size);
  });
  block->pool->blocks.erase(block);
  forget(block->ptr, block->size);
  unset_known_fill(block->ptr, block->size);
  munmap(block->ptr, block->size);
  delete block;
}

void DeviceMemory::release_all(BlockPool& pool) {
  auto blocks = pool.blocks;
  for (Block* block : blocks) {
    if (block->segment) unmap(block);
    else if (!block->is_split()) release(block);
  }
}

void DeviceMemory::empty_cache(c10::MempoolId_t) {
  if (!routes_.empty()) return;
  for (Stream* s : all_streams(device_)) drain(*s);  // cudaFree waits for the device
  process_pending();
  release_all(small_);
  release_all(large_);
  for (auto it = private_.begin(); it != private_.end();) {
    auto& pool = *it->second;
    if (pool.users == 0) {
      release_all(pool.small);
      release_all(pool.large);
    }
    it = pool.users == 0 && pool.segments == 0 ? private_.erase(it) : std::next(it);
  }
}

void DeviceMemory::out_of_memory(size_t nbytes) {
  stats.num_ooms++;
  auto text = [](int64_t n) {
    char line[40];
    snprintf(line, sizeof line, n < (1 << 30) ? "%.2f MiB" : "%.2f GiB", n / (n < (1 << 30) ? 1048576. : 1073741824.));
    return std::string(line);
  };
  int64_t allocated = stats.allocated_bytes[0].current, held = stats.reserved_bytes[0].current;
  std::string allowed = limit_set ? text(limit_set) + " allowed; " : "";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", text(nbytes), ". GPU ", device_,
                   " has a total capacity of ", text(kDeviceBytes), " of which ", text(kDeviceBytes - reserved),
                   " is free. ", allowed, "Of the allocated memory ", text(allocated),
                   " is allocated by PyTorch, and ", text(held - allocated),
                   " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
                   "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
}

// ---- pools of CUDA graphs

void DeviceMemory::begin_pool(c10::MempoolId_t id, std::function<bool(const Stream&)> takes) {
  auto& pool = private_[id];
  if (pool) pool->users++;
  else pool = std::make_unique<PrivatePool>(PrivatePool{id});
  pool->small.owner = pool->large.owner = pool.get();
  routes_.emplace_back(id, std::move(takes));
}
void DeviceMemory::end_pool(c10::MempoolId_t id) {
  for (auto it = routes_.begin(); it != routes_.end(); ++it)
    if (it->first == id) { routes_.erase(it); return; }
}
void DeviceMemory::release_pool(c10::MempoolId_t id) {
  auto found = private_.find(id);
  if (found != private_.end()) found->second->users--;  // the next empty_cache frees what no tensor uses
}

// ---- figures

std::vector<Segment> DeviceMemory::snapshot() const {
  std::set<Block*> firsts;
  auto add = [&](Block* b) {
    while (b->prev && b->prev->mapped) b = b->prev;
    firsts.insert(b);
  };
  for (Block* b : live) add(b);
  auto add_pool = [&](const BlockPool& pool) { for (Block* b : pool.blocks) add(b); };
  add_pool(small_);
  add_pool(large_);
  for (auto& [id, pool] : private_) { add_pool(pool->small); add_pool(pool->large); }
  std::vector<Segment> found;
  for (Block* first : firsts) {
    Segment s{reinterpret_cast<size_t>(first->ptr), 0, 0, 0, first->stream->id, first->pool->small,
              first->segment != nullptr, first->pool->owner ? first->pool->owner->id : c10::MempoolId_t{0, 0}, {}};
    for (Block* b = first; b && b->mapped; b = b->next) {
      bool waits = !b->allocated && live.count(b);
      s.total += b->size;
      if (b->allocated) s.allocated += b->size;
      if (b->allocated || waits) s.active += b->size;
      s.blocks.emplace_back(b->size, b->requested,
                            b->allocated ? "active_allocated" : waits ? "active_pending_free" : "inactive");
    }
    found.push_back(std::move(s));
  }
  return found;
}

template <typename F>
static void each_array(Stats& s, F change) {
  for (auto* a : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                  &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
    for (auto& stat : *a) change(stat);
}
void DeviceMemory::reset_peaks() { each_array(stats, [](auto& stat) { stat.reset_peak(); }); }
void DeviceMemory::reset_accumulated() {
  each_array(stats, [](auto& stat) { stat.reset_accumulated(); });
  stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
}

// ---- what torch calls

Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}
static void deleter(void* p) { allocator().free(p); }

static void fill_with_poison(Block& block) {
  if (!poison || block.stream->recording || block.pool->owner) return;  // a graph may run at any time
  char* p = block.ptr;
  size_t nbytes = block.size;
  push(*block.stream, [p, nbytes] {
    if (known_fill(p, nbytes, 0xFF)) return;
    memset(p, 0xFF, nbytes);
    set_known_fill(p, nbytes, 0xFF);
  });
}

c10::DataPtr Allocator::allocate(size_t nbytes) {
  Lock lock(mutex);
  c10::Device device(c10::DeviceType::CUDA, current_device);
  if (nbytes == 0) return {nullptr, nullptr, &deleter, device};
  Block* block = devices[current_device].malloc(nbytes, current_stream());
  live[block->ptr] = block;
  fill_with_poison(*block);
  return {block->ptr, block->ptr, &deleter, device};
}
void Allocator::free(void* p) {
  if (!p) return;
  Lock lock(mutex);
  auto found = live.find(p);
  TORCH_INTERNAL_ASSERT(found != live.end(), "a block of the test device is freed twice");
  Block* block = found->second;
  live.erase(found);
  if (block->used_by.empty()) fill_with_poison(*block);
  devices[block->device].free(block);
}
void Allocator::recordStream(const c10::DataPtr& ptr, c10::Stream s) {
  Lock lock(mutex);
  auto found = live.find(ptr.get_context());
  if (found != live.end() && found->second->stream != &stream_of(s)) found->second->used_by.insert(&stream_of(s));
}
c10::DeleterFnPtr Allocator::raw_deleter() const { return &deleter; }
void Allocator::copy_data(void* to, const void* from, size_t nbytes) const { memcpy(to, from, nbytes); }
void Allocator::emptyCache(c10::MempoolId_t id) {
  Lock lock(mutex);
  for (auto& memory : devices) memory.empty_cache(id);
}
Stats Allocator::getDeviceStats(c10::DeviceIndex d) { Lock lock(mutex); return devices.at(d).stats; }
void Allocator::resetAccumulatedStats(c10::DeviceIndex d) { Lock lock(mutex); devices.at(d).reset_accumulated(); }
void Allocator::resetPeakStats(c10::DeviceIndex d) { Lock lock(mutex); devices.at(d).reset_peaks(); }
std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex d) {
  Lock lock(mutex);
  return {kDeviceBytes - devices.at(d).reserved, kDeviceBytes};
}

int device_of(const void* address) {
  Lock lock(mutex);
  auto* p = static_cast<const char*>(address);
  for (auto& memory : allocator().devices)
    for (Block* block : memory.live)
      if (block->ptr <= p && p < block->ptr + block->size) return block->device;
  return -1;
}

}  // namespace testdevice
