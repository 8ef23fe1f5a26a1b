#include "generators.h"
#include <ATen/EmptyTensor.h>
#include "streams.h"

namespace testdevice {

static auto keys() { return c10::DispatchKeySet(c10::DispatchKey::CUDA); }

Generator::Generator(int device, std::shared_ptr<GeneratorState> shared)
    : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), keys()), state(std::move(shared)) {}

static void refuse(const GeneratorState& state, const char* what) {
  TORCH_CHECK(!state.capturing, "Cannot call CUDAGeneratorImpl::", what, " during CUDA graph capture.");
}
void Generator::set_current_seed(uint64_t v) {
  refuse(*state, "set_current_seed");
  state->seed = v;
  state->offset = 0;
}
void Generator::set_offset(uint64_t v) {
  refuse(*state, "set_offset");
  TORCH_CHECK(v % 4 == 0, "offset must be a multiple of 4");
  state->offset = v;
}
uint64_t Generator::get_offset() const { refuse(*state, "get_offset"); return state->offset; }
uint64_t Generator::current_seed() const { refuse(*state, "current_seed"); return state->seed; }
uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return state->seed;
}
void Generator::set_state(const c10::TensorImpl& bytes) {
  TORCH_CHECK(bytes.numel() == 16, "RNG state is wrong size");
  auto* p = static_cast<const uint64_t*>(bytes.data());
  set_current_seed(p[0]);
  set_offset(p[1]);
}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto made = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  auto* p = static_cast<uint64_t*>(made.mutable_data_ptr());
  p[0] = current_seed();
  p[1] = get_offset();
  return made.getIntrusivePtr();
}
void Generator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  state = static_cast<Generator*>(other.get())->state;
}
c10::intrusive_ptr<c10::GeneratorImpl> Generator::graphsafe_get_state() const {
  return c10::make_intrusive<Generator>(device().index(), state);
}
Generator* Generator::clone_impl() const {
  refuse(*state, "clone");
  return new Generator(device().index(), std::make_shared<GeneratorState>(*state));
}

at::Generator& default_generator(int device) {
  static std::array<at::Generator, kDevices> made = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return made.at(device < 0 ? current_device : device);
}
Generator& as_ours(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == at::kCUDA, "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

Draw draw_from(Generator& generator, bool recording) {
  auto& state = *generator.state;
  TORCH_CHECK(recording == state.capturing, recording
              ? "Attempt to draw from a generator that is not registered with the CUDA graph"
              : "Offset increment outside graph capture encountered unexpectedly.");
  uint64_t& offset = recording ? state.captured_offset : state.offset;
  Draw made{generator.state, state.seed, offset};
  offset += kOffsetOfKernel;
  return made;
}

}  // namespace testdevice
