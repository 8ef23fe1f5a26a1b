// The clock of DistributedDataParallel's reducer, which it looks up by the device of the parameters.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include "streams.h"

namespace testdevice {

class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(c10::Device) {}
  void record(Event event) override {
    Lock lock(mutex);
    getTimeRef(event) = static_cast<int64_t>(1e9 * host.now_s);
  }
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
}  // namespace testdevice

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, testdevice::ReducerTimer);
}
