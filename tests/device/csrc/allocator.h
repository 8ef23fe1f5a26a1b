// The device's memory, by the rules of torch's native caching allocator (c10/cuda/CUDACachingAllocator.cpp).
//
// Requests are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, whose segments have 2 MiB;
// above, from the large pool, whose segments have 20 MiB, or whole multiples of 2 MiB from 10 MiB on. A block of the
// large pool is split only if more than 1 MiB would be left. With expandable segments, each pool of a stream is one
// address range that is mapped in granules of 2 MiB (small) or 20 MiB, and every block is split.
//
// What is handed out and what comes back is filled with 0xFF, in the order of its stream.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include "streams.h"

namespace testdevice {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kDeviceBytes = size_t(16) << 30;

struct BlockPool;
struct ExpandableSegment {
  char* start;
  size_t size, granule;
};
struct Block {
  int device;
  Stream* stream;
  BlockPool* pool;
  char* ptr;
  size_t size;
  size_t requested = 0;
  bool allocated = false, mapped = true;
  Block *prev = nullptr, *next = nullptr;
  std::set<Stream*> used_by;  // other streams
  int pending = 0;            // their events that have not happened yet
  ExpandableSegment* segment = nullptr;

  bool is_split() const { return prev || next; }
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->ptr) < std::tie(b->stream, b->size, b->ptr);
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->ptr) < std::tie(b->stream, b->ptr);
  }
};
struct PrivatePool;
struct BlockPool {
  bool small;
  PrivatePool* owner = nullptr;
  std::set<Block*, BySize> blocks{};       // free and mapped
  std::set<Block*, ByAddress> unmapped{};  // of expandable segments
  size_t type() const { return small ? 1 : 2; }  // c10::CachingAllocator::StatType
};
struct PrivatePool {  // of CUDA graphs
  c10::MempoolId_t id;
  int users = 1;
  int segments = 0;
  BlockPool small{true, this}, large{false, this};
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
template <typename F>
void both(Stats& stats, const BlockPool& pool, F change) {  // the sum over pools, and this pool's
  change(stats, 0);
  change(stats, pool.type());
}
inline size_t rounded_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
char* map_pages(size_t nbytes);

struct Segment {
  size_t address, total, allocated, active;
  int64_t stream;
  bool is_small, expandable;
  c10::MempoolId_t pool;
  std::vector<std::tuple<size_t, size_t, std::string>> blocks;  // size, requested, state
};

// The allocator of one device.
class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}
  Block* malloc(size_t nbytes, Stream& s);
  void free(Block* block);
  void empty_cache(c10::MempoolId_t id = {0, 0});
  void begin_pool(c10::MempoolId_t id, std::function<bool(const Stream&)> takes);
  void end_pool(c10::MempoolId_t id);
  void release_pool(c10::MempoolId_t id);
  std::vector<Segment> snapshot() const;
  void reset_peaks();
  void reset_accumulated();

  Stats stats;
  size_t limit = kDeviceBytes;
  size_t limit_set = 0;  // as torch.cuda.set_per_process_memory_fraction does; 0: not set
  size_t reserved = 0;
  std::set<Block*> live;  // all that are allocated, or wait for other streams

 private:
  BlockPool& pool_for(size_t size, const Stream& s);
  Block* find_free(BlockPool& pool, Stream& s, size_t size);
  Block* new_segment(BlockPool& pool, Stream& s, size_t size);
  Block* grow(BlockPool& pool, Stream& s, size_t size);
  bool map(Block* block, size_t size);
  void unmap(Block* block);
  Block* candidate_to_map(BlockPool& pool, Stream& s, size_t size);
  bool should_split(const Block& block, size_t size) const;
  void release(Block* block);
  void release_all(BlockPool& pool);
  void process_pending();
  void return_block(Block* block);
  size_t merge(Block* into, Block* other);
  void count_inactive(const Block& block, bool more);
  [[noreturn]] void out_of_memory(size_t nbytes);

  int device_;
  BlockPool small_{true}, large_{false};
  std::map<c10::MempoolId_t, std::unique_ptr<PrivatePool>> private_;
  std::vector<std::pair<c10::MempoolId_t, std::function<bool(const Stream&)>>> routes_;
  std::vector<std::pair<Event, Block*>> pending_;
  std::vector<Block*> deferred_;  // freed while a graph is captured, with uses on other streams
};

struct Allocator final : c10::DeviceAllocator {
  std::array<DeviceMemory, kDevices> devices{DeviceMemory(0), DeviceMemory(1)};
  std::unordered_map<void*, Block*> live;

  c10::DataPtr allocate(size_t nbytes) override;
  void free(void* p);
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& ptr, c10::Stream s) override;
  void emptyCache(c10::MempoolId_t id = {0, 0}) override;
  Stats getDeviceStats(c10::DeviceIndex d) override;
  void resetAccumulatedStats(c10::DeviceIndex d) override;
  void resetPeakStats(c10::DeviceIndex d) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override;
};
Allocator& allocator();
int device_of(const void* address);  // -1 if it is not memory of a device

// Whole blocks whose bytes are all alike and known, so that filling them again costs nothing.
bool known_fill(const void* address, size_t nbytes, int byte);
void set_known_fill(const void* address, size_t nbytes, int byte);
void unset_known_fill(const void* address, size_t nbytes);

// The workspaces of matrix products, one for each handle (of a thread) and stream, as torch gives them to cuBLAS.
void take_workspace(Stream& s);
void clear_workspaces();

}  // namespace testdevice
