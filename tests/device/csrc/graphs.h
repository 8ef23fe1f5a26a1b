// CUDA graphs: while a stream is captured, launches are recorded with their addresses and run at each replay.
//
// A recorded kernel is run once on zeros, for the shapes of its results. The generators of a graph keep the seed and
// offset that they have at each replay, and advance by what the graph draws.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <functional>
#include "generators.h"
#include "streams.h"

namespace testdevice {

using Offsets = std::map<GeneratorState*, std::pair<uint64_t, uint64_t>>;  // seed and first offset of a replay
struct Node {
  std::string name;
  double seconds;
  std::function<void(Stream&)> touch;        // notes what it reads and writes
  std::function<void(const Offsets&)> run;
};
struct Recording {
  std::vector<Node> nodes;
};

class Graph {
 public:
  ~Graph();
  void register_generator(const at::Generator& generator);
  void capture_begin(c10::MempoolId_t pool, const std::string& mode);
  void capture_end();
  void replay();
  void reset();
  c10::MempoolId_t pool() const { return pool_; }

 private:
  struct Registered { std::shared_ptr<GeneratorState> state; uint64_t draws = 0; };
  std::vector<Registered> generators_;
  std::shared_ptr<Recording> recording_ = std::make_shared<Recording>();
  c10::MempoolId_t pool_{0, 0};
  int device_ = -1;
  bool capturing_ = false, captured_ = false;
};
c10::MempoolId_t new_pool(bool by_handle);

}  // namespace testdevice
