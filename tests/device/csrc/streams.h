// Streams, events, clocks: when the work of the device happens.
//
// A stream is a queue of closures. They run as late as possible: when somebody waits for them, or when the next
// kernel of the stream is launched. So work that is not waited for has not happened, and its reader finds poison.
// With the policy "early" streams other than the default one run their work at once instead, so that work which
// ought to wait for them runs too soon.
//
// Time is counted, not measured. A launch takes the host kLaunchSeconds; a stream is busy for the seconds of its
// work. All figures are the same at each run.
#pragma once
#include <torch/csrc/python_headers.h>
#include <c10/core/Stream.h>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace testdevice {

constexpr int kDevices = 2;
int visible_devices();  // as CUDA counts CUDA_VISIBLE_DEVICES: up to its first entry that is no device
constexpr double kLaunchSeconds = 5e-6;  // what the host needs to launch a kernel
constexpr double kQuerySeconds = 1e-6;   // what the host needs to ask for an event
constexpr double kKernelSeconds = 2e-6;  // what the shortest kernel runs
constexpr double kMemoryRate = 2e12;     // bytes a second
constexpr double kLinkRate = 25e9;       // bytes a second between host and device
constexpr double kArithmeticRate = 50e12;  // float operations a second

extern std::recursive_mutex mutex;  // of everything in this library

// Holds the mutex. A thread that has Python's lock gives it up while it waits, because the holder of the mutex may
// need Python's lock: to drop the last reference to a tensor, for example.
class Lock {
 public:
  explicit Lock(std::recursive_mutex&) { lock(); }
  ~Lock() { if (held_) unlock(); }
  Lock(const Lock&) = delete;
  void lock();
  void unlock() { mutex.unlock(); held_ = false; }

 private:
  bool held_ = false;
};

// What is known to have happened: the number of launches of each stream, by the stream's slot.
using Order = std::vector<uint64_t>;
void join(Order& into, const Order& other);

struct Recording;  // of a CUDA graph

struct Stream;
struct Item {
  std::function<void()> run;
  Stream* other = nullptr;  // first run this stream's items up to a number
  uint64_t upto = 0;
};

struct Stream {
  int device = 0;
  int64_t id = 0;
  size_t slot = 0;
  std::deque<Item> queue;
  uint64_t pushed = 0, done = 0;  // items
  Order order;                    // what has happened before the next launch
  double free_s = 0;              // when the work so far ends
  Recording* recording = nullptr;  // set while launches are recorded instead of run

  uint64_t tick() const { return order[slot]; }
};

struct Event {
  Stream* stream = nullptr;
  uint64_t pushed = 0;
  Order order;
  double at_s = 0;
  Recording* recording = nullptr;
};

struct Host {
  Order order;  // what the host has waited for; all of its threads count as one
  double now_s = 0;
};

extern Host host;
extern bool early;  // the policy
extern bool poison;
extern std::map<std::string, int64_t> syncs, launches;  // how often, by name

Stream& stream_of(const c10::Stream& s);
Stream& stream_of(int device, int64_t id);
Stream& current_stream();
Stream& current_stream(int device);
c10::Stream as_c10(const Stream& s);
std::vector<Stream*> all_streams(int device);

void push(Stream& s, std::function<void()> run, bool at_once = false);
void drain(Stream& s);
// Begins work of a stream: counts it, and returns after the host's share of it.
void launch(Stream& s, const std::string& name, double seconds);

Event record(Stream& s);
void wait(Stream& s, const Event& event);
bool query(const Event& event);
void synchronize(const Event& event, const std::string& name);
void synchronize_device(int device, const std::string& name);  // all devices if -1
void refuse_while_recording(const std::string& what);
void refuse_while_recording(const Stream& s, const std::string& what);

extern thread_local int current_device;
extern thread_local std::map<int, int64_t> current_stream_ids;

}  // namespace testdevice
