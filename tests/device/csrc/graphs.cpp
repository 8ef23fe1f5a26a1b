#include "graphs.h"
#include "allocator.h"

namespace testdevice {

c10::MempoolId_t new_pool(bool by_handle) {
  static uint64_t made = 0;
  Lock lock(mutex);
  made++;
  return by_handle ? c10::MempoolId_t{0, made} : c10::MempoolId_t{made, 0};
}

void Graph::register_generator(const at::Generator& generator) {
  Lock lock(mutex);
  auto state = as_ours(generator).state;
  for (auto& known : generators_) if (known.state == state) return;
  generators_.push_back({state});
}

void Graph::capture_begin(c10::MempoolId_t pool, const std::string& mode) {
  Lock lock(mutex);
  TORCH_CHECK(!captured_, "This CUDAGraph instance already owns a captured graph.");
  Stream& s = current_stream();
  TORCH_CHECK(s.id != 0, "CUDA graphs must be captured on a non-default stream.");
  refuse_while_recording(s, "the begin of a second capture");
  register_generator(default_generator(current_device));
  device_ = current_device;
  pool_ = pool == c10::MempoolId_t{0, 0} ? new_pool(false) : pool;
  for (auto& g : generators_) {
    TORCH_CHECK(!g.state->capturing, "a generator is used by another capture");
    g.state->capturing = true;
    g.state->captured_offset = 0;
  }
  drain(s);
  s.recording = recording_.get();
  capturing_ = true;
  auto* recording = recording_.get();
  allocator().devices[device_].begin_pool(pool_, [recording](const Stream& t) { return t.recording == recording; });
}

void Graph::capture_end() {
  Lock lock(mutex);
  TORCH_CHECK(capturing_, "capture_end without capture_begin");
  for (Stream* s : all_streams(-1)) if (s->recording == recording_.get()) s->recording = nullptr;
  allocator().devices[device_].end_pool(pool_);
  for (auto& g : generators_) {
    g.state->capturing = false;
    g.draws = std::exchange(g.state->captured_offset, 0);
  }
  capturing_ = false;
  captured_ = true;
}

void Graph::replay() {
  Lock lock(mutex);
  TORCH_CHECK(captured_, "Called CUDAGraph::replay without a preceding successful capture.");
  Stream& s = current_stream(device_);
  refuse_while_recording(s, "a replay");
  Offsets offsets;
  for (auto& g : generators_) {
    offsets[g.state.get()] = {g.state->seed, g.state->offset};
    g.state->offset += g.draws;
  }
  double seconds = 0;
  for (auto& node : recording_->nodes) seconds += node.seconds;
  launch(s, "graph", seconds);
  for (auto& node : recording_->nodes) node.touch(s);
  push(s, [recording = recording_, offsets] { for (auto& node : recording->nodes) node.run(offsets); });
}

void Graph::reset() {
  Lock lock(mutex);
  if (capturing_) capture_end();
  if (!captured_) return;
  for (Stream* s : all_streams(device_)) drain(*s);
  allocator().devices[device_].release_pool(pool_);
  recording_ = std::make_shared<Recording>();
  captured_ = false;
}
Graph::~Graph() { reset(); }

}  // namespace testdevice
