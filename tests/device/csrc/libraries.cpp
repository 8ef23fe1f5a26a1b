// Stand-ins for the kernels that torch takes from libraries on CUDA: cuDNN's convolutions, batch norms and LSTMs, and the
// three fused attentions, which are selected as torch selects them on Hopper.
//
// They are registered for the CPU, so that the fallback runs them like any other operator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include "kernels.h"
#include "streams.h"

namespace testdevice {

using namespace at;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

// ---- convolutions

static Tensor convolution(const Tensor& x, const Tensor& weight, SymIntArrayRef padding, SymIntArrayRef stride,
                          SymIntArrayRef dilation, c10::SymInt groups, bool, bool, bool) {
  return at::convolution_symint(x, weight, {}, stride, padding, dilation, false, std::vector<c10::SymInt>(padding.size(), 0), groups);
}
static Tensor convolution_transpose(const Tensor& x, const Tensor& weight, SymIntArrayRef padding, SymIntArrayRef output_padding,
                                    SymIntArrayRef stride, SymIntArrayRef dilation, c10::SymInt groups, bool, bool, bool) {
  return at::convolution_symint(x, weight, {}, stride, padding, dilation, true, output_padding, groups);
}
static Tensor depthwise(const Tensor& x, const Tensor& weight, SymIntArrayRef, const MaybeTensor& bias,
                        SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation) {
  return at::convolution_symint(x, weight, bias, stride, padding, dilation, false, std::vector<c10::SymInt>(padding.size(), 0), x.sym_size(1));
}
static std::tuple<Tensor, Tensor> convolution_backward(const Tensor& x, const Tensor& grad, const Tensor& weight, IntArrayRef stride,
                                                       IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                       IntArrayRef output_padding, int64_t groups, std::array<bool, 2> mask) {
  auto made = at::convolution_backward(grad, x, weight, std::nullopt, stride, padding, dilation, transposed, output_padding,
                                       groups, {mask[0], mask[1], false});
  return {std::get<0>(made), std::get<1>(made)};
}
TORCH_LIBRARY(testdevice, m) {
  m.def("convolution_backward(Tensor x, Tensor grad, Tensor weight, int[] stride, int[] padding, int[] dilation, "
        "bool transposed, int[] output_padding, int groups, bool[2] mask) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(testdevice, CPU, m) { m.impl("convolution_backward", convolution_backward); }

template <typename... Args>
static std::tuple<Tensor, Tensor> on_device_backward(const Args&... args) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("testdevice::convolution_backward", "")
                       .typed<decltype(convolution_backward)>();
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(args...);
}
static std::tuple<Tensor, Tensor> cudnn_backward(const Tensor& x, const Tensor& grad, const Tensor& weight, IntArrayRef padding,
                                                 IntArrayRef stride, IntArrayRef dilation, int64_t groups, bool, bool, bool,
                                                 std::array<bool, 2> mask) {
  std::vector<int64_t> none(padding.size(), 0);
  return on_device_backward(x, grad, weight, stride, padding, dilation, false, IntArrayRef(none), groups, mask);
}
static std::tuple<Tensor, Tensor> cudnn_transpose_backward(const Tensor& x, const Tensor& grad, const Tensor& weight,
                                                           IntArrayRef padding, IntArrayRef output_padding, IntArrayRef stride,
                                                           IntArrayRef dilation, int64_t groups, bool, bool, bool,
                                                           std::array<bool, 2> mask) {
  return on_device_backward(x, grad, weight, stride, padding, dilation, true, output_padding, groups, mask);
}
static std::tuple<Tensor, Tensor> depthwise_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, IntArrayRef,
                                                     IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                     std::array<bool, 2> mask) {
  std::vector<int64_t> none(padding.size(), 0);
  return on_device_backward(x, grad, weight, stride, padding, dilation, false, IntArrayRef(none), x.size(1), mask);
}

// ---- batch norms

static std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                                             const MaybeTensor& mean, const MaybeTensor& var, bool training,
                                                             double momentum, double eps) {
  auto [y, saved_mean, saved_invstd] = at::native_batch_norm(x, weight, bias, mean, var, training, momentum, eps);
  Tensor reserve = at::zeros({training ? (x.numel() + 7) / 8 : 0}, x.options().dtype(kByte));
  return {y, saved_mean, saved_invstd, reserve};
}
static Tensor3 batch_norm_backward(const Tensor& x, const Tensor& grad, const Tensor& weight, const MaybeTensor& mean,
                                   const MaybeTensor& var, const MaybeTensor& saved_mean, const MaybeTensor& saved_invstd,
                                   double eps, const Tensor&) {
  return at::native_batch_norm_backward(grad.contiguous(x.suggest_memory_format()), x, weight, mean, var, saved_mean, saved_invstd,
                                        true, eps, {true, true, true});
}

// ---- LSTMs

using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
constexpr int64_t kLstm = 2;  // as cuDNN numbers the modes

static Tensor steps_outside(const Tensor& t) { return t.transpose(0, 1).contiguous().transpose(0, 1); }
static std::vector<size_t> flat_order(TensorList weights) {  // as cuDNN: the matrices of all layers, then the biases
  std::vector<size_t> order;
  for (bool matrices : {true, false})
    for (size_t i = 0; i < weights.size(); i++)
      if ((weights[i].dim() == 2) == matrices) order.push_back(i);
  return order;
}
static Tensor flatten_weight(TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t, bool, bool) {
  std::vector<Tensor> parts;
  for (size_t i : flat_order(weights)) parts.push_back(weights[i].reshape(-1));
  return at::cat(parts);
}
static std::vector<Tensor> read_weights(TensorList weights, const Tensor& flat) {  // like cuDNN, of the flat ones alone
  std::vector<Tensor> found(weights.begin(), weights.end());
  int64_t begin = 0;
  if (flat.defined() && flat.numel())
    for (size_t i : flat_order(weights)) {
      found[i] = flat.slice(0, begin, begin + weights[i].numel()).view(weights[i].sizes());
      begin += weights[i].numel();
    }
  return found;
}
static Five lstm(const Tensor& x, TensorList weights, int64_t weights_a_layer, const MaybeTensor& flat, const Tensor& hx,
                 const MaybeTensor& cx, int64_t mode, c10::SymInt, c10::SymInt, int64_t layers, bool batch_first, double dropout,
                 bool train, bool bidirectional, SymIntArrayRef batch_sizes, const MaybeTensor&) {
  TORCH_CHECK(mode == kLstm && dropout == 0 && batch_sizes.empty(), "the test device has no recurrent layers but plain LSTMs");
  at::NoGradGuard no_grad;  // the CPU's kernel rounds differently with gradients
  auto read = read_weights(weights, flat.value_or(Tensor()));
  auto [y, h, c] = at::lstm(x, {hx, *cx}, read, weights_a_layer % 4 == 0, layers, 0.0, train, bidirectional, batch_first);
  if (batch_first) y = steps_outside(y);
  return {y, h, c, at::zeros({train ? y.numel() : 0}, x.options().dtype(kByte)), at::empty({0}, x.options())};
}
static std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> lstm_backward(
    const Tensor& x, TensorList weights, int64_t weights_a_layer, const Tensor& flat, const Tensor& hx, const MaybeTensor& cx,
    const Tensor&, const MaybeTensor& grad_y, const MaybeTensor& grad_h, const MaybeTensor& grad_c, int64_t, c10::SymInt,
    c10::SymInt, int64_t layers, bool batch_first, double, bool train, bool bidirectional, SymIntArrayRef, const MaybeTensor&,
    const Tensor&, std::array<bool, 4> mask) {
  std::optional<pybind11::gil_scoped_release> free;  // autograd's engine is not called with it
  if (PyGILState_Check()) free.emplace();
  c10::impl::ForceDispatchKeyGuard with_autograd(c10::default_included_set, c10::default_excluded_set);
  at::AutoGradMode on(true);
  std::vector<Tensor> leaves{x, hx, *cx}, outputs, grads;
  auto read = read_weights(weights, flat);
  leaves.insert(leaves.end(), read.begin(), read.end());
  for (auto& t : leaves) t = t.detach().requires_grad_();
  auto [y, h, c] = at::lstm(leaves[0], {leaves[1], leaves[2]}, TensorList(leaves).slice(3), weights_a_layer % 4 == 0, layers, 0.0,
                            train, bidirectional, batch_first);
  for (auto& [output, grad] : {std::pair{y, grad_y}, {h, grad_h}, {c, grad_c}})
    if (grad && grad->defined()) { outputs.push_back(output); grads.push_back(*grad); }
  auto found = torch::autograd::grad(outputs, leaves, grads, std::nullopt, false, true);
  for (size_t i = 0; i < found.size(); i++)
    if (!mask[std::min<size_t>(i, 3)]) found[i] = Tensor();
    else if (!found[i].defined()) found[i] = at::zeros_like(leaves[i]);
  if (batch_first && found[0].defined()) found[0] = steps_outside(found[0]);
  return {found[0], found[1], found[2], std::vector<Tensor>(found.begin() + 3, found.end())};
}
static void lstm_of_cudnn(Tensor& y, Tensor& h, Tensor& c, const Tensor& x, TensorList state, TensorList weights, bool biased,
                          int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto made = at::_cudnn_rnn(x, weights, biased ? 4 : 2, at::empty({0}, x.options()), state[0], state[1], kLstm, state[0].size(2), 0, layers, batch_first,
                             dropout, train, bidirectional, {}, {});
  y = std::get<0>(made), h = std::get<1>(made), c = std::get<2>(made);
}

// ---- RMS norms, which are one kernel on CUDA and several operators on the CPU; rounded once, as one kernel does

static std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, IntArrayRef shape, const MaybeTensor& weight, std::optional<double> eps) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < shape.size(); i++) dims.push_back(x.dim() - 1 - static_cast<int64_t>(i));
  Tensor wide = x.to(kDouble), sums = wide.square().mean(dims, true);
  Tensor inverse = (sums + eps.value_or(std::numeric_limits<float>::epsilon())).rsqrt();
  Tensor y = wide * inverse;
  if (weight && weight->defined()) y = y * *weight;
  return {y.to(x.scalar_type()).contiguous(), inverse.to(x.scalar_type() == kDouble ? kDouble : kFloat)};
}
static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, IntArrayRef shape, const Tensor& inverse,
                                                    const MaybeTensor& weight, std::array<bool, 2> mask) {
  std::vector<int64_t> dims, rows;
  for (int64_t i = 0; i < x.dim(); i++)
    (i < x.dim() - static_cast<int64_t>(shape.size()) ? rows : dims).push_back(i);
  Tensor g = grad.to(kDouble), r = inverse.to(kDouble), normed = x.to(kDouble) * r, dx, dw;
  const bool scaled = weight && weight->defined();
  Tensor through = scaled ? g * *weight : g;
  if (mask[0]) dx = ((through - normed * (through * normed).mean(dims, true)) * r).to(x.scalar_type());
  if (mask[1] && scaled) dw = (rows.empty() ? g * normed : (g * normed).sum(rows)).to(weight->scalar_type());
  return {dx, dw};
}

// ---- attention

struct Attention {  // in float32: probabilities, and the factors of dropout
  Tensor q, k, v, probabilities, factors, logsumexp;
  double scale;
};
static Attention attend(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, double dropout,
                        bool causal, std::optional<double> scale, uint64_t seed, uint64_t offset) {
  Attention a;
  a.q = q.to(kFloat), a.k = k.to(kFloat), a.v = v.to(kFloat);
  a.scale = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
  if (k.size(1) != q.size(1)) {  // grouped queries
    a.k = a.k.repeat_interleave(q.size(1) / k.size(1), 1);
    a.v = a.v.repeat_interleave(q.size(1) / k.size(1), 1);
  }
  Tensor scores = a.q.matmul(a.k.transpose(-2, -1)) * a.scale;
  if (bias && bias->defined()) scores = scores + bias->to(kFloat);
  if (causal) {
    Tensor later = at::ones({scores.size(-2), scores.size(-1)}, kBool).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<float>::infinity());
  }
  a.logsumexp = scores.logsumexp(-1);
  a.probabilities = (scores - a.logsumexp.unsqueeze(-1)).exp();
  if (dropout > 0) {
    auto generator = at::detail::createCPUGenerator(seed * 1000003 + offset);
    a.factors = at::rand(scores.sizes(), generator).ge(dropout).to(kFloat) / (1 - dropout);
  }
  return a;
}
static Tensor output_of(const Attention& a) {
  return (a.factors.defined() ? a.probabilities * a.factors : a.probabilities).matmul(a.v);
}
static Tensor like(const Tensor& layout, const Tensor& value) {  // the bytes of a value in the layout of a tensor
  return at::empty_like(layout).copy_(value);
}
static std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(const Attention& a, const Tensor& grad, int64_t kv_heads) {
  Tensor g = grad.to(kFloat), dropped = a.factors.defined() ? a.probabilities * a.factors : a.probabilities;
  Tensor dv = dropped.transpose(-2, -1).matmul(g), dp = g.matmul(a.v.transpose(-2, -1));
  if (a.factors.defined()) dp = dp * a.factors;
  Tensor ds = a.probabilities * (dp - (dp * a.probabilities).sum(-1, true));
  Tensor dq = ds.matmul(a.k) * a.scale, dk = ds.transpose(-2, -1).matmul(a.q) * a.scale;
  if (kv_heads != dk.size(1)) {
    dk = dk.unflatten(1, {kv_heads, -1}).sum(2);
    dv = dv.unflatten(1, {kv_heads, -1}).sum(2);
  }
  return {dq, dk, dv, ds};
}
static uint64_t drawn() {
  auto generator = at::detail::getDefaultCPUGenerator();
  return at::check_generator<CPUGeneratorImpl>(generator)->random64() >> 16;
}
using Fused = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

static Fused flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  Tensor state = at::zeros({2}, at::dtype(kUInt64));
  if (dropout > 0) state.mutable_data_ptr<uint64_t>()[0] = drawn();
  auto a = attend(q, k, v, {}, dropout, causal, scale, *state.const_data_ptr<uint64_t>(), 0);
  return {like(q, output_of(a)), a.logsumexp, Tensor(), Tensor(), q.size(2), k.size(2), state, at::zeros({}, at::dtype(kUInt64)),
          at::empty({0}, q.options())};
}
static Tensor3 flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
                              const Tensor& state, const Tensor&, std::optional<double> scale) {
  auto a = attend(q, k, v, {}, dropout, causal, scale, *state.const_data_ptr<uint64_t>(), 0);
  auto [dq, dk, dv, ds] = gradients(a, grad, k.size(1));
  return {like(q, dq), like(k, dk), like(v, dv)};
}
static Fused cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, bool, double dropout, bool causal,
                   bool, std::optional<double> scale) {
  Tensor seed = at::zeros({}, at::dtype(kLong)), offset = at::zeros({}, at::dtype(kLong));
  if (dropout > 0) seed.fill_(static_cast<int64_t>(drawn()));
  auto a = attend(q, k, v, bias, dropout, causal, scale, seed.item<int64_t>(), 0);
  return {like(q, output_of(a)), a.logsumexp.unsqueeze(-1), Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
}
static Tensor3 cudnn_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                                        const Tensor&, const Tensor& seed, const Tensor&, const Tensor& bias, const Tensor&,
                                        const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
                                        std::optional<double> scale) {
  auto a = attend(q, k, v, bias, dropout, causal, scale, seed.item<int64_t>(), 0);
  auto [dq, dk, dv, ds] = gradients(a, grad, k.size(1));
  return {like(q, dq), like(k, dk), like(v, dv)};
}
static Tensor heads_inside(const Tensor& value, ScalarType dtype) {  // stored as batch, length, heads, width
  return value.to(dtype).transpose(1, 2).contiguous().transpose(1, 2);
}
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias,
                                                            bool with_logsumexp, double dropout, bool causal,
                                                            std::optional<double> scale) {
  Tensor seed = at::zeros({}, at::dtype(kLong)), offset = at::zeros({}, at::dtype(kLong));
  if (dropout > 0) seed.fill_(static_cast<int64_t>(drawn()));
  auto a = attend(q, k, v, bias, dropout, causal, scale, seed.item<int64_t>(), 0);
  int64_t length = (q.size(2) + 31) / 32 * 32;
  Tensor sums = with_logsumexp ? at::constant_pad_nd(a.logsumexp, {0, length - q.size(2)}, std::numeric_limits<float>::infinity())
                               : at::empty({q.size(0), q.size(1), 0}, at::dtype(kFloat));
  return {heads_inside(output_of(a), q.scalar_type()), sums, seed, offset};
}
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                                     const Tensor& bias, const Tensor&, const Tensor&,
                                                                     const Tensor& seed, const Tensor&, double dropout,
                                                                     std::array<bool, 4> mask, bool causal,
                                                                     std::optional<double> scale) {
  auto a = attend(q, k, v, bias, dropout, causal, scale, seed.item<int64_t>(), 0);
  auto [dq, dk, dv, ds] = gradients(a, grad, k.size(1));
  auto type = q.scalar_type();
  Tensor db = mask[3] && bias.defined() ? ds.sum_to_size(bias.sizes()).to(bias.scalar_type()) : Tensor();
  return {heads_inside(dq, type), heads_inside(dk, type), heads_inside(dv, type), db};
}

// ---- selection, as in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp

static bool usable(at::SDPBackend backend, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, bool causal) {
  auto& context = at::globalContext();
  const bool with_bias = bias && bias->defined();
  const bool half = q.scalar_type() == kHalf || q.scalar_type() == kBFloat16;
  const bool plain = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.scalar_type() == k.scalar_type() &&
                     q.scalar_type() == v.scalar_type() && q.sym_stride(-1) == 1 && k.sym_stride(-1) == 1 &&
                     v.sym_stride(-1) == 1 && q.sym_size(2) > 0 && k.sym_size(2) > 0 &&
                     (!with_bias || bias->sym_stride(-1) == 1);
  const auto width = q.sym_size(-1);
  const bool one_width = width == k.sym_size(-1) && width == v.sym_size(-1);
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return context.userEnabledFlashSDP() && plain && half && !with_bias && one_width && width <= 256 &&
             !(causal && q.sym_size(2) != k.sym_size(2));
    case at::SDPBackend::cudnn_attention:
      return context.userEnabledCuDNNSDP() && plain && half && one_width && width <= 128 && width % 8 == 0 &&
             !context.deterministicAlgorithms();
    case at::SDPBackend::efficient_attention:
      return context.userEnabledMemEfficientSDP() && plain && (half || q.scalar_type() == kFloat) &&
             width == k.sym_size(-1) && width % (half ? 8 : 4) == 0 && v.sym_size(-1) % (half ? 8 : 4) == 0 &&
             q.sym_size(1) == k.sym_size(1) && q.sym_size(1) == v.sym_size(1);
    default: return backend == at::SDPBackend::math && context.userEnabledMathSDP();
  }
}
static int64_t select(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, double, bool causal,
                      std::optional<double>, bool) {
  static std::once_flag first;  // at the first selection cuDNN comes to the front
  std::call_once(first, [] {
    std::vector<int64_t> order;
    for (auto b : {at::SDPBackend::cudnn_attention, at::SDPBackend::flash_attention, at::SDPBackend::efficient_attention,
                   at::SDPBackend::math})
      order.push_back(static_cast<int64_t>(b));
    at::globalContext().setSDPPriorityOrder(order);
  });
  for (auto backend : at::globalContext().sDPPriorityOrder())
    if (usable(backend, q, k, v, bias, causal)) return static_cast<int64_t>(backend);
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("cudnn_convolution", convolution);
  m.impl("cudnn_convolution_transpose", convolution_transpose);
  m.impl("_conv_depthwise2d", depthwise);
  m.impl("cudnn_batch_norm", batch_norm);
  m.impl("cudnn_batch_norm_backward", batch_norm_backward);
  m.impl("_cudnn_rnn", lstm);
  m.impl("_cudnn_rnn_flatten_weight", flatten_weight);
  m.impl("_cudnn_rnn_backward", lstm_backward);
  m.impl("_fused_rms_norm", rms_norm);
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("_fused_sdp_choice", select); }

static int stubs = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&select);
  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm_of_cudnn);
  at::native::cudnn_convolution_backward_stub.set_cuda_dispatch_ptr(&cudnn_backward);
  at::native::cudnn_convolution_transpose_backward_stub.set_cuda_dispatch_ptr(&cudnn_transpose_backward);
  at::native::conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise_backward);
  return 0;
}();

}  // namespace testdevice
