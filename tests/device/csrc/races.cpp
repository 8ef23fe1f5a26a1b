#include "races.h"
#include <set>
#include <sstream>

namespace testdevice {

struct Access {
  const Stream* stream = nullptr;
  uint64_t tick = 0;
  const std::string* name = nullptr;

  bool before(const Stream& s) const {
    return !stream || stream == &s || (stream->slot < s.order.size() && s.order[stream->slot] >= tick);
  }
};
struct Span {
  uintptr_t end = 0;
  Access write;
  std::vector<Access> reads;  // since then, at most one of each stream
};

static std::map<uintptr_t, Span> spans;  // by their first byte; they do not overlap
static std::vector<std::string> found;
static std::set<std::string> names;

static void split(uintptr_t at) {
  auto next = spans.upper_bound(at);
  if (next == spans.begin()) return;
  auto& [start, span] = *std::prev(next);
  if (start == at || span.end <= at) return;
  Span rest = span;
  span.end = at;
  spans[at] = rest;
}

static void report(const Access& old, bool old_write, const Access& now, bool write) {
  if (found.size() >= 20) return;
  auto place = [](const Access& a) {
    return *a.name + " (cuda:" + std::to_string(a.stream->device) + ", stream " + std::to_string(a.stream->id) + ")";
  };
  std::ostringstream line;
  line << place(now) << (write ? " writes" : " reads") << " memory that " << place(old)
       << (old_write ? " writes" : " reads") << ", and no event orders them";
  for (auto& known : found) if (known == line.str()) return;
  found.push_back(line.str());
}

void accessed(const void* address, size_t nbytes, bool write, const Stream& s, const std::string& name) {
  if (!nbytes) return;
  const uintptr_t start = reinterpret_cast<uintptr_t>(address), end = start + nbytes;
  const Access now{&s, s.tick(), &*names.insert(name).first};
  split(start);
  split(end);
  auto check = [&](const Span& span) {
    if (!span.write.before(s)) report(span.write, true, now, write);
    if (write)
      for (auto& read : span.reads) if (!read.before(s)) report(read, false, now, write);
  };
  if (write) {
    auto it = spans.lower_bound(start);
    while (it != spans.end() && it->first < end) {
      check(it->second);
      it = spans.erase(it);
    }
    spans[start] = Span{end, now, {}};
    return;
  }
  uintptr_t at = start;
  for (auto it = spans.lower_bound(start); at < end;) {
    if (it == spans.end() || it->first > at) {  // never written
      uintptr_t until = it == spans.end() ? end : std::min(end, it->first);
      spans[at] = Span{until, {}, {now}};
      at = until;
      continue;
    }
    check(it->second);
    bool known = false;
    for (auto& read : it->second.reads) if (read.stream == &s) { read = now; known = true; }
    if (!known) it->second.reads.push_back(now);
    at = it->second.end;
    ++it;
  }
}

void forget(const void* address, size_t nbytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(address), end = start + nbytes;
  split(start);
  split(end);
  spans.erase(spans.lower_bound(start), spans.lower_bound(end));
}

std::vector<std::string> take_races() { return std::exchange(found, {}); }

}  // namespace testdevice
