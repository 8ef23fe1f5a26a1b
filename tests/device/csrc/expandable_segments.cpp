// Segments that grow: the part of `DeviceMemory` for the setting expandable_segments:True.
#include <sys/mman.h>
#include "allocator.h"
#include "races.h"

namespace testdevice {

constexpr size_t kGranuleSmall = 2 * kMiB, kGranuleLarge = 20 * kMiB;

Block* DeviceMemory::candidate_to_map(BlockPool& pool, Stream& s, size_t size) {
  auto usable = [](Block* b) { return b && !b->allocated && !b->pending && b->used_by.empty(); };
  Block key{device_, &s, &pool, nullptr, 0};
  for (auto it = pool.unmapped.lower_bound(&key); it != pool.unmapped.end() && (*it)->stream == &s; ++it) {
    Block* first = *it;
    if (usable(first->prev)) first = first->prev;
    size_t nbytes = 0;
    for (Block* b = first; nbytes < size && usable(b); b = b->next) nbytes += b->size;
    if (nbytes >= size) return first;
  }
  size_t range = kDeviceBytes + kDeviceBytes / 8;
  auto* segment = new ExpandableSegment{map_pages(range), range, pool.small ? kGranuleSmall : kGranuleLarge};
  auto* made = new Block{device_, &s, &pool, segment->start, range};
  made->mapped = false;
  made->segment = segment;
  pool.unmapped.insert(made);
  return made;
}

bool DeviceMemory::map(Block* block, size_t size) {
  size_t nbytes = std::min(rounded_up(size, block->segment->granule), block->size);
  if (reserved + nbytes > limit) return false;
  BlockPool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->mapped = true;
  if (nbytes < block->size) {
    auto* rest = new Block{device_, block->stream, &pool, block->ptr + nbytes, block->size - nbytes};
    rest->mapped = false;
    rest->segment = block->segment;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = nbytes;
    pool.unmapped.insert(rest);
  }
  merge(block, block->prev);
  merge(block, block->next);
  pool.blocks.insert(block);
  reserved += nbytes;
  if (pool.owner) pool.owner->segments++;
  stats.num_device_alloc++;
  both(stats, pool, [&](Stats& t, size_t i) { t.reserved_bytes[i].increase(nbytes); });
  return true;
}

Block* DeviceMemory::grow(BlockPool& pool, Stream& s, size_t size) {
  Block* block = candidate_to_map(pool, s, size);
  if (!block->mapped && !map(block, std::min(block->size, size))) return nullptr;
  while (block->size < size) {
    Block* next = block->next;
    if (!map(next, std::min(size - block->size, next->size))) return nullptr;
    block = next;  // merged with what was before it
  }
  pool.blocks.erase(block);
  return block;
}

void DeviceMemory::unmap(Block* block) {
  auto* segment = block->segment;
  size_t offset = block->ptr - segment->start;
  size_t from = rounded_up(offset, segment->granule);
  size_t until = (offset + block->size) / segment->granule * segment->granule;
  if (until <= from) return;
  BlockPool& pool = *block->pool;
  pool.blocks.erase(block);
  auto part = [&](size_t start, size_t end) {  // mapped bytes that stay
    auto* made = new Block{device_, block->stream, &pool, segment->start + start, end - start};
    made->segment = segment;
    pool.blocks.insert(made);
    return made;
  };
  if (from > offset) {
    Block* before = part(offset, from);
    before->prev = block->prev;
    if (before->prev) before->prev->next = before;
    before->next = block;
    block->prev = before;
  }
  if (until < offset + block->size) {
    Block* after = part(until, offset + block->size);
    after->next = block->next;
    if (after->next) after->next->prev = after;
    after->prev = block;
    block->next = after;
  }
  block->ptr = segment->start + from;
  block->size = until - from;
  block->mapped = false;
  reserved -= block->size;
  forget(block->ptr, block->size);
  madvise(block->ptr, block->size, MADV_DONTNEED);
  stats.num_device_free++;
  size_t nbytes = block->size;
  if (pool.owner) pool.owner->segments--;
  both(stats, pool, [&](Stats& t, size_t i) { t.reserved_bytes[i].decrease(nbytes); });
  merge(block, block->prev);
  merge(block, block->next);
  pool.unmapped.insert(block);
}

}  // namespace testdevice
