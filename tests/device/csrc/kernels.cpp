#include "kernels.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>
#include "allocator.h"
#include "generators.h"
#include "graphs.h"
#include "pinned.h"
#include "races.h"

namespace testdevice {

using namespace at;
using Stack = torch::jit::Stack;
constexpr auto kKey = c10::DispatchKey::CUDA;

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kCUDA; }

Tensor as_cpu(const Tensor& t) {
  auto whole = t.storage();
  c10::DataPtr bytes(const_cast<void*>(whole.data()), Device(kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), whole.nbytes(), std::move(bytes), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
static Tensor zeros_alike(const Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(kCPU).pinned_memory(false)).zero_();
}

Extent extent_of(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {nullptr, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  return {static_cast<const char*>(t.const_data_ptr()), (last + 1) * t.itemsize()};
}
void touch(const Extent& e, bool write, Stream& s, const std::string& name) {
  if (e.nbytes) accessed(e.start, e.nbytes, write, s, name);
}

// The bytes appear at their place when something waits for the stream.
void publish(Stream& s, const Tensor& place, const Tensor& made) {
  if (place.numel() == 0) return;
  push(s, [place = as_cpu(place), made] {
    Below below;
    auto e = extent_of(place);
    unset_known_fill(e.start, e.nbytes);
    const_cast<Tensor&>(place).copy_(made);
  });
}

// ---- time

double seconds_of(const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  double nbytes = 0, flops = 0;
  for (auto* list : {&read, &written}) for (auto& t : *list) if (t.defined()) nbytes += t.nbytes();
  auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  const double outputs = written.empty() || !written[0].defined() ? 0 : written[0].numel();
  if ((has("mm") || has("linear")) && read.size() >= 2) flops = 2 * outputs * read[read.size() - 1].size(-2);
  else if (has("conv") && read.size() >= 2)
    for (auto& t : read) flops = std::max(flops, 2.0 * read[0].numel() * t.numel() / std::max<int64_t>(1, t.size(0)));
  else if (has("attention") && read.size() >= 3) flops = 4.0 * outputs * read[1].size(-2);
  return kKernelSeconds + std::max(nbytes / kMemoryRate, flops / kArithmeticRate);
}
static bool multiplies_matrices(const std::string& name) {
  for (auto* known : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_",
                      "aten::addmv", "aten::addmv_", "aten::dot", "aten::_addmm_activation"})
    if (name == known) return true;
  return false;
}

// ---- calls

// Calls an operator on CPU tensors; draws by seed and offset if there are any.
static std::vector<IValue> call(const c10::OperatorHandle& op, const std::vector<IValue>& args,
                                const std::optional<std::pair<uint64_t, uint64_t>>& draw) {
  Stack stack(args.begin(), args.end());
  if (!draw) { op.callBoxed(stack); return stack; }
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto kept = cpu.get_state();
  cpu.set_current_seed(draw->first * 1000003 + draw->second);
  try { op.callBoxed(stack); } catch (...) { cpu.set_state(kept); throw; }
  cpu.set_state(kept);
  return stack;
}

// Applies a function to each tensor of a value.
template <typename F>
static IValue each_tensor(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (Tensor t : value.toTensorList()) made.push_back(f(t));
    return IValue(made);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      made.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return IValue(made);
  }
  return value;
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}
static Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                    std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

// One launch of an operator.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack* stack) : op_(op), name_(op.schema().name()) {
    const size_t n = op.schema().arguments().size();
    args_.assign(stack->end() - n, stack->end());
    torch::jit::drop(*stack, n);
    device_ = current_device;
    bool found = false;
    for (auto& a : args_) each_tensor(a, [&](const Tensor& t) {
      if (!found && on_device(t)) { device_ = t.device().index(); found = true; }
      return t;
    });
  }
  int device() const { return device_; }
  void run(Stack* stack, Lock& lock);

 private:
  struct Write { Tensor place, copy; };
  void turn_arguments(bool recording);
  Tensor turned(const Tensor& t, bool write, bool recording);
  Tensor back(const Tensor& made, bool stays_on_host);
  void record_node(Stream& s, const std::optional<Draw>& draw);
  bool returns_host_tensor(size_t index, bool recording) const {  // seeds, when not captured
    return !recording && index >= 2 && name_ == "aten::_scaled_dot_product_efficient_attention";
  }

  c10::OperatorHandle op_;
  std::string name_;
  std::vector<IValue> args_;       // as the caller gave them
  std::vector<IValue> cpu_args_;   // what the kernel is called with
  std::vector<IValue> results_;
  std::vector<Tensor> read_, written_;
  std::vector<std::pair<Tensor, Tensor>> inputs_;  // tensors of the device, and as the CPU sees them
  std::vector<Write> writes_;
  std::vector<std::pair<Tensor, Tensor>> made_;    // new results, and their values
  int device_ = 0;
  at::Generator generator_;
};

Tensor Launch::turned(const Tensor& t, bool write, bool recording) {
  if (!on_device(t)) return t;
  TORCH_CHECK(t.device().index() == device_, "Expected all tensors to be on the same device, but found at least two "
              "devices, cuda:", device_, " and ", t.device(), "! (in ", name_, ")");
  Tensor seen = as_cpu(t);
  (write ? written_ : read_).push_back(seen);
  if (!write) {
    Tensor given = recording ? zeros_alike(t) : seen;
    inputs_.emplace_back(t, given);
    return given;
  }
  Tensor copy = recording ? zeros_alike(t) : at::empty_strided(t.sizes(), t.strides(), seen.options());
  if (!recording) copy.copy_(seen);
  writes_.push_back({t, copy});
  return copy;
}

void Launch::turn_arguments(bool recording) {
  for (size_t i = 0; i < args_.size(); i++) {
    auto* alias = op_.schema().arguments()[i].alias_info();
    const bool write = alias && alias->isWrite();
    auto& a = args_[i];
    if (a.isDevice()) { cpu_args_.emplace_back(Device(kCPU)); continue; }
    if (a.isGenerator()) {
      generator_ = a.toGenerator();
      cpu_args_.emplace_back();
      continue;
    }
    cpu_args_.push_back(each_tensor(a, [&](const Tensor& t) { return turned(t, write, recording); }));
  }
}

// What the caller gets for a tensor that the kernel has returned.
Tensor Launch::back(const Tensor& made, bool stays_on_host) {
  if (!made.defined() || made.device().type() != kCPU || stays_on_host) return made;
  for (auto& w : writes_) if (w.copy.is_same(made)) return w.place;
  for (auto& [t, c] : inputs_) {
    if (c.is_same(made)) return t;
    if (made.numel() && c.storage().data() == made.storage().data()) {  // a view
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                                           c10::DispatchKeySet(kKey), made.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      return view;
    }
  }
  Tensor place = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, Device(kCUDA, device_), {});
  made_.emplace_back(place, made);
  return place;
}

void Launch::run(Stack* stack, Lock& lock) {
  c10::DeviceGuard guard(Device(kCUDA, device_));
  Below below;
  Stream& s = current_stream(device_);
  const bool recording = s.recording;
  if (!recording) drain(s);
  turn_arguments(recording);
  if (multiplies_matrices(name_)) take_workspace(s);
  std::optional<Draw> draw;
  std::optional<std::pair<uint64_t, uint64_t>> seeds;
  if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
    draw = draw_from(as_ours(generator_.defined() ? generator_ : default_generator(device_)), recording);
    seeds = {draw->seed, draw->offset};
  }
  if (!draw) lock.unlock();  // the kernel may be Python's
  auto& results = results_ = call(op_, cpu_args_, seeds);
  if (!draw) lock.lock();
  std::vector<IValue> returned;
  bool to_host = op_.hasTag(at::Tag::dynamic_output_shape);
  for (size_t i = 0; i < results.size(); i++) {
    to_host |= !results[i].isTensor() && !results[i].isTensorList();
    returned.push_back(each_tensor(results[i], [&](const Tensor& t) { return back(t, returns_host_tensor(i, recording)); }));
  }
  for (auto& w : writes_)
    if (w.place.sizes() != w.copy.sizes()) at::native::resize_(w.place, w.copy.sizes(), {});
  if (to_host && !results.empty() && (!read_.empty() || !written_.empty()) && name_.find("attention") == std::string::npos) {
    refuse_while_recording(s, name_);
    synchronize(record(s), name_);
  }
  if (recording) record_node(s, draw);
  else {
    std::vector<Tensor> outputs;
    for (auto& [place, made] : made_) outputs.push_back(made);
    outputs.insert(outputs.end(), written_.begin(), written_.end());
    launch(s, name_, seconds_of(name_, read_, outputs));
    for (auto& t : read_) touch(extent_of(t), false, s, name_);
    for (auto& w : writes_) { touch(extent_of(w.place), true, s, name_); publish(s, w.place, w.copy); }
    for (auto& [place, made] : made_) { touch(extent_of(place), true, s, name_); publish(s, place, made); }
  }
  stack->insert(stack->end(), returned.begin(), returned.end());
}

void Launch::record_node(Stream& s, const std::optional<Draw>& draw) {
  std::vector<IValue> raw;  // with the places of all tensors, of the sizes that the operator has given them
  for (auto& a : args_) {
    if (a.isDevice()) raw.emplace_back(Device(kCPU));
    else if (a.isGenerator()) raw.emplace_back();
    else raw.push_back(each_tensor(a, [](const Tensor& t) { return on_device(t) ? as_cpu(t) : t; }));
  }
  std::vector<Extent> reads, writes;
  std::vector<Tensor> places, outputs = written_;
  for (auto& t : read_) reads.push_back(extent_of(t));
  for (auto& w : writes_) writes.push_back(extent_of(w.place));
  for (auto& [place, made] : made_) { writes.push_back(extent_of(place)); places.push_back(as_cpu(place)); }
  for (auto& t : places) outputs.push_back(t);
  auto touch_all = [reads, writes, name = name_](Stream& t) {
    for (auto& e : reads) touch(e, false, t, name);
    for (auto& e : writes) touch(e, true, t, name);
  };
  auto work = [op = op_, args = raw, places, writes, draw, name = name_](const Offsets& offsets) {
    Below below;
    std::optional<std::pair<uint64_t, uint64_t>> seeds;
    if (draw) {
      auto [seed, offset] = offsets.at(draw->state.get());
      seeds = {seed, offset + draw->offset};
    }
    for (auto& e : writes) unset_known_fill(e.start, e.nbytes);
    auto results = call(op, args, seeds);
    size_t next = 0;
    for (auto& r : results) each_tensor(r, [&](const Tensor& t) {
      bool given = !t.defined();
      for (auto& a : args) each_tensor(a, [&](const Tensor& u) {
        given |= u.defined() && (u.is_same(t) || (t.defined() && t.numel() && u.storage().data() == t.storage().data()));
        return u;
      });
      if (!given && next < places.size()) const_cast<Tensor&>(places[next++]).copy_(t);
      return t;
    });
  };
  s.recording->nodes.push_back({name_, seconds_of(name_, read_, outputs), touch_all, work});
}

static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Launch launch(op, stack);  // its tensors are dropped after the mutex
  Lock lock(mutex);
  launch.run(stack, lock);
}

// ---- views and storages

static Tensor view(const Tensor& t, IntArrayRef size) { return at::native::view(t, size); }
static Tensor reshape_alias(const Tensor& t, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}
static Tensor as_strided(const Tensor& t, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
static const Tensor& resize_(const Tensor& t, IntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(t, size, format);
}
static Tensor& set_storage(Tensor& t, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
static Tensor& set_whole(Tensor& t, Storage storage) { return at::native::set_(t, storage); }
static Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }
static void record_stream(Tensor& t, c10::Stream s) { allocator().recordStream(t.storage().data_ptr(), s); }
static bool is_pinned_tensor(const Tensor& t, std::optional<Device>) { return is_pinned(t.const_data_ptr()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  // Kernels of CUDA that autograd would otherwise compose of others.
  for (auto* one : {"_fused_rms_norm", "mish_backward"}) m.impl(one, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
static int registered_allocator = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator(), 255);
  return 0;
}();

}  // namespace testdevice
