// Random generators: a seed and an offset, as torch's Philox generators have them.
//
// A kernel draws with the CPU's generator, which is seeded by (seed, offset) for this one kernel. So the same state
// gives the same numbers, and every kernel advances the offset by 4.
#pragma once
#include <ATen/core/Generator.h>
#include <memory>

namespace testdevice {

struct GeneratorState {  // shared by generators that torch makes with graphsafe_get_state
  uint64_t seed = c10::default_rng_seed_val, offset = 0;
  bool capturing = false;
  uint64_t captured_offset = 0;  // of the graph that is being captured
};

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device, std::shared_ptr<GeneratorState> state = std::make_shared<GeneratorState>());
  std::shared_ptr<GeneratorState> state;

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& bytes) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  Generator* clone_impl() const override;
};

at::Generator& default_generator(int device);  // -1: of the current device
Generator& as_ours(const at::Generator& generator);

constexpr uint64_t kOffsetOfKernel = 4;
// What one kernel draws from. While a graph is captured the offset counts from the graph's begin.
struct Draw {
  std::shared_ptr<GeneratorState> state;
  uint64_t seed, offset;
};
Draw draw_from(Generator& generator, bool recording);

}  // namespace testdevice
