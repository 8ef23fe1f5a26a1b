// What Python sees: the functions behind torch.cuda (see torch_cuda.py), and what tests ask of the device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include "allocator.h"
#include "generators.h"
#include "graphs.h"
#include "pinned.h"
#include "races.h"

namespace py = pybind11;

namespace testdevice {


static py::dict stat(const c10::CachingAllocator::Stat& s) {
  py::dict made;
  made["current"] = s.current;
  made["peak"] = s.peak;
  made["allocated"] = s.allocated;
  made["freed"] = s.freed;
  return made;
}
static py::dict array(const c10::CachingAllocator::StatArray& a) {
  py::dict made;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (size_t i = 0; i < 3; i++) made[names[i]] = stat(a[i]);
  return made;
}
static py::dict memory_stats(int device) {
  auto s = allocator().getDeviceStats(device);
  py::dict made;
  made["num_alloc_retries"] = s.num_alloc_retries;
  made["num_ooms"] = s.num_ooms;
  made["num_sync_all_streams"] = s.num_sync_all_streams;
  made["num_device_alloc"] = s.num_device_alloc;
  made["num_device_free"] = s.num_device_free;
  made["max_split_size"] = -1;
  made["allocation"] = array(s.allocation);
  made["segment"] = array(s.segment);
  made["active"] = array(s.active);
  made["inactive_split"] = array(s.inactive_split);
  made["allocated_bytes"] = array(s.allocated_bytes);
  made["reserved_bytes"] = array(s.reserved_bytes);
  made["active_bytes"] = array(s.active_bytes);
  made["inactive_split_bytes"] = array(s.inactive_split_bytes);
  made["requested_bytes"] = array(s.requested_bytes);
  made["oversize_allocations"] = stat(s.oversize_allocations);
  made["oversize_segments"] = stat(s.oversize_segments);
  return made;
}
static py::list segments() {
  py::list made;
  for (int d = 0; d < kDevices; d++) {
    std::vector<Segment> found;
    { py::gil_scoped_release release; Lock lock(mutex); found = allocator().devices[d].snapshot(); }
    for (auto& s : found) {
      py::dict one;
      one["device"] = d;
      one["address"] = s.address;
      one["total_size"] = s.total;
      one["allocated_size"] = s.allocated;
      one["active_size"] = s.active;
      one["stream"] = s.stream;
      one["segment_type"] = s.is_small ? "small" : "large";
      one["segment_pool_id"] = py::make_tuple(s.pool.first, s.pool.second);
      one["is_expandable"] = s.expandable;
      py::list blocks;
      size_t address = s.address;
      for (auto& [size, requested, state] : s.blocks) {
        py::dict block;
        block["address"] = address;
        block["size"] = size;
        block["requested_size"] = requested;
        block["state"] = state;
        blocks.append(block);
        address += size;
      }
      one["blocks"] = blocks;
      made.append(one);
    }
  }
  return made;
}
static std::tuple<int64_t, int64_t, int64_t> stream_data(const Stream& s) {
  return {s.id, s.device, static_cast<int64_t>(c10::DeviceType::CUDA)};
}
static int exchange(int d) {
  TORCH_CHECK(d < visible_devices(), "CUDA error: invalid device ordinal");
  int before = current_device;
  if (d >= 0) current_device = d;
  return before;
}
static void sleep(int64_t cycles) {
  Stream& s = current_stream();
  launch(s, "sleep", cycles / 1.7e9);
}
}  // namespace testdevice

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace testdevice;
  using Free = py::call_guard<py::gil_scoped_release>;
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  // For torch.cuda.
  m.def("device_count", [] { return visible_devices(); });
  m.def("device_nbytes", [] { return kDeviceBytes; });
  m.def("device", [] { return current_device; });
  m.def("exchange_device", exchange);
  m.def("maybe_exchange_device", exchange);  // another object: the compiler looks functions up by identity
  m.def("stream", [](int d) { Lock lock(mutex); return stream_data(current_stream(d)); }, Free());
  m.def("default_stream", [](int d) { Lock lock(mutex); return stream_data(stream_of(d, 0)); }, Free());
  m.def("set_stream", [](int64_t id, int d) { current_device = d; current_stream_ids[d] = id; });
  m.def("elapsed_ms", [](size_t from, size_t to) {
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    return 1e3 * (reinterpret_cast<testdevice::Event*>(to)->at_s - reinterpret_cast<testdevice::Event*>(from)->at_s);
  });
  m.def("synchronize", [] { Lock lock(mutex); synchronize_device(current_device, "device"); }, Free());
  m.def("sleep", [](int64_t cycles) { Lock lock(mutex); sleep(cycles); }, Free());
  m.def("empty_cache", [] { allocator().emptyCache(); }, Free());
  m.def("memory_stats", memory_stats);
  m.def("segments", segments);
  m.def("reset_peaks", [](int d) { allocator().resetPeakStats(d); }, Free());
  m.def("reset_accumulated", [](int d) { allocator().resetAccumulatedStats(d); }, Free());
  m.def("memory_info", [](int d) { return allocator().getMemoryInfo(d); }, Free());
  m.def("set_memory_limit", [](size_t n, int d) {
    Lock lock(mutex);
    allocator().devices.at(d).limit = allocator().devices.at(d).limit_set = n;
  }, Free());
  m.def("memory_limit", [](int d) { return allocator().devices.at(d).limit; });
  m.def("clear_workspaces", clear_workspaces, Free());
  m.def("generator", [](int d) { return default_generator(d); });
  m.def("pin", [](size_t p, size_t n) { return pin(reinterpret_cast<void*>(p), n); }, Free());
  m.def("unpin", [](size_t p) { return unpin(reinterpret_cast<void*>(p)); }, Free());
  m.def("is_capturing", [] { Lock lock(mutex); return current_stream().recording != nullptr; }, Free());
  m.def("pool_handle", [] { return new_pool(true); }, Free());
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("register_generator_state", [](Graph& g, at::Generator generator) { g.register_generator(generator); })
      .def("capture_begin", &Graph::capture_begin, Free())
      .def("capture_end", &Graph::capture_end, Free())
      .def("replay", &Graph::replay, Free())
      .def("reset", &Graph::reset, Free())
      .def("pool", &Graph::pool);
  // For tests.
  m.def("set_policy", [](bool runs_early, bool poisons) { Lock lock(mutex); early = runs_early; poison = poisons; }, Free());
  m.def("syncs", [] { Lock lock(mutex); return syncs; }, Free());
  m.def("launches", [] { Lock lock(mutex); return launches; }, Free());
  m.def("reset_counts", [] { Lock lock(mutex); syncs.clear(); launches.clear(); }, Free());
  m.def("take_races", [] { Lock lock(mutex); return take_races(); }, Free());
  m.def("host_s", [] { Lock lock(mutex); return host.now_s; }, Free());
}
