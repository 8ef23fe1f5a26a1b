#include "streams.h"
#include <algorithm>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <cstdlib>
#include <set>
#include <sstream>
#include "allocator.h"

namespace testdevice {

std::recursive_mutex mutex;
Host host;
bool early = false;
bool poison = true;
std::map<std::string, int64_t> syncs, launches;
thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_stream_ids;

static std::map<std::pair<int, int64_t>, Stream> streams;
static int64_t next_id = 1;

void Lock::lock() {
  held_ = true;
  if (mutex.try_lock()) return;
  if (!Py_IsInitialized() || !PyGILState_Check()) return mutex.lock();
  PyThreadState* thread = PyEval_SaveThread();
  mutex.lock();
  PyEval_RestoreThread(thread);
}

void join(Order& into, const Order& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

Stream& stream_of(int device, int64_t id) {
  Lock lock(mutex);
  auto found = streams.find({device, id});
  if (found != streams.end()) return found->second;
  Stream& made = streams[{device, id}];
  made.device = device;
  made.id = id;
  made.slot = streams.size() - 1;
  made.order.resize(made.slot + 1);
  return made;
}
Stream& stream_of(const c10::Stream& s) { return stream_of(s.device_index(), s.id()); }
Stream& current_stream(int device) { return stream_of(device, current_stream_ids[device]); }
Stream& current_stream() { return current_stream(current_device); }
c10::Stream as_c10(const Stream& s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, s.device), s.id);
}
std::vector<Stream*> all_streams(int device) {
  std::vector<Stream*> found;
  for (auto& [key, s] : streams)
    if (device < 0 || s.device == device) found.push_back(&s);
  return found;
}

static void drain_upto(Stream& s, uint64_t upto) {
  while (s.done < upto && !s.queue.empty()) {
    Item item = std::move(s.queue.front());
    s.queue.pop_front();
    s.done++;
    if (item.other) drain_upto(*item.other, item.upto);
    if (item.run) item.run();
  }
}
void drain(Stream& s) { drain_upto(s, s.pushed); }

void push(Stream& s, std::function<void()> run, bool at_once) {
  s.queue.push_back(Item{std::move(run)});
  s.pushed++;
  if (at_once) drain(s);
}

void launch(Stream& s, const std::string& name, double seconds) {
  launches[name]++;
  host.now_s += kLaunchSeconds;
  join(s.order, host.order);
  s.order[s.slot]++;
  s.free_s = std::max(s.free_s, host.now_s) + seconds;
}

Event record(Stream& s) {
  Event made{&s, s.pushed, s.order, std::max(s.free_s, host.now_s), s.recording};
  return made;
}

void wait(Stream& s, const Event& event) {
  if (event.recording || s.recording) {
    if (event.recording) s.recording = event.recording;  // the stream joins the capture
    return;  // a graph's nodes run in the order of their launches
  }
  join(s.order, event.order);
  s.free_s = std::max(s.free_s, event.at_s);
  s.queue.push_back(Item{nullptr, event.stream, event.pushed});
  s.pushed++;
  if (early && s.id != 0) drain(s);
}

// The host learns that an event has happened. Everything that may have run before it has then run too: so a
// reader that forgot another wait finds memory that was overwritten.
static void happened(const Event& event) {
  if (!early && event.stream->id != 0) drain(stream_of(event.stream->device, 0));
  drain_upto(*event.stream, event.pushed);
  join(host.order, event.order);
}

bool query(const Event& event) {
  refuse_while_recording("a query of an event");
  host.now_s += kQuerySeconds;
  if (event.at_s > host.now_s) return false;
  happened(event);
  return true;
}

void synchronize(const Event& event, const std::string& name) {
  refuse_while_recording("a synchronization");
  syncs[name]++;
  host.now_s = std::max(host.now_s, event.at_s);
  happened(event);
}

void synchronize_device(int device, const std::string& name) {
  refuse_while_recording("a synchronization");
  syncs[name]++;
  for (Stream* s : all_streams(device)) {
    drain(*s);
    join(host.order, s->order);
    host.now_s = std::max(host.now_s, s->free_s);
  }
}

int visible_devices() {
  static const int count = [] {
    const char* listed = getenv("CUDA_VISIBLE_DEVICES");
    if (!listed) return kDevices;
    std::set<int> seen;
    std::istringstream entries(listed);
    for (std::string entry; std::getline(entries, entry, ',');) {
      const bool known = entry.size() == 1 && entry[0] >= '0' && entry[0] < '0' + kDevices;
      if (!known || !seen.insert(entry[0]).second) break;
    }
    return static_cast<int>(seen.size());
  }();
  return count;
}

void refuse_while_recording(const Stream& s, const std::string& what) {
  TORCH_CHECK(!s.recording, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}
void refuse_while_recording(const std::string& what) {
  for (int device = 0; device < kDevices; device++) refuse_while_recording(current_stream(device), what);
}

// What torch asks of a device: guards, streams and events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(c10::Device d) { return d.has_index() ? d.index() : current_device; }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = getDevice();
    TORCH_CHECK(!d.has_index() || d.index() < visible_devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current_device); }
  void setDevice(c10::Device d) const override { exchangeDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = index_of(d); }
  c10::Stream getStream(c10::Device d) const override { return as_c10(current_stream(index_of(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return as_c10(stream_of(index_of(d), 0)); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    Lock lock(mutex);
    return as_c10(stream_of(index_of(d), next_id++));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream_ids[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return visible_devices(); }

  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*e) *e = new Event();
    *static_cast<Event*>(*e) = testdevice::record(stream_of(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    Lock lock(mutex);
    if (e) wait(stream_of(s), *static_cast<Event*>(e));
  }
  bool queryEvent(void* e) const override {
    Lock lock(mutex);
    return !e || query(*static_cast<Event*>(e));
  }
  void synchronizeEvent(void* e) const override {
    Lock lock(mutex);
    if (e) synchronize(*static_cast<Event*>(e), "event");
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(mutex);
    return query(testdevice::record(stream_of(s)));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock(mutex);
    synchronize(testdevice::record(stream_of(s)), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    Lock lock(mutex);
    synchronize_device(d, "device");
  }
  bool isStreamCapturing(const c10::Stream& s) const { return stream_of(s).recording != nullptr; }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    allocator().recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(b)->at_s - static_cast<Event*>(a)->at_s);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace testdevice
