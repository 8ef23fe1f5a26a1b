// Copies and fills: between devices, with the host, and the numbers that the host reads.
#include <ATen/ops/_local_scalar_dense_native.h>
#include "allocator.h"
#include "graphs.h"
#include "kernels.h"
#include "pinned.h"
#include "races.h"

namespace testdevice {

using namespace at;

static double link_seconds(size_t nbytes) { return kKernelSeconds + nbytes / kLinkRate; }

// A copy of bytes between the device and pinned memory, which the host does not wait for.
static void copy_bytes(Stream& s, Tensor& self, const Tensor& src) {
  Extent to = extent_of(self), from = extent_of(src);
  auto touch_both = [to, from](Stream& t) {
    touch(from, false, t, "aten::copy_");
    touch(to, true, t, "aten::copy_");
  };
  auto work = [to, from] {
    unset_known_fill(to.start, to.nbytes);
    memcpy(const_cast<char*>(to.start), from.start, from.nbytes);
  };
  if (s.recording) {
    s.recording->nodes.push_back({"copy", link_seconds(to.nbytes), touch_both, [work](const Offsets&) { work(); }});
    return;
  }
  launch(s, "aten::copy_", link_seconds(to.nbytes));
  touch_both(s);
  push(s, work, early && s.id != 0);
}

static Tensor& copy_with_host(Tensor& self, const Tensor& src, bool non_blocking) {
  const bool to_device = on_device(self);
  const Tensor& host_side = to_device ? src : self;
  Stream& s = current_stream((to_device ? self : src).device().index());
  bool plain = self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.strides() == src.strides() &&
               self.is_non_overlapping_and_dense() && self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg();
  if (non_blocking && plain && is_pinned(host_side.const_data_ptr())) { copy_bytes(s, self, src); return self; }
  refuse_while_recording(s, "a copy that the host waits for");
  drain(s);
  launch(s, "aten::copy_", link_seconds(self.nbytes()));
  if (to_device) {  // the host's bytes are read before this returns, also if it does not wait for the device
    touch(extent_of(self), true, s, "aten::copy_");
    Tensor made = at::empty_strided(self.sizes(), self.strides(), self.options().device(kCPU).pinned_memory(false));
    publish(s, self, made.copy_(src));
    if (!non_blocking) synchronize(record(s), "copy to device");
  } else {
    touch(extent_of(src), false, s, "aten::copy_");
    synchronize(record(s), "copy to host");
    self.copy_(as_cpu(src));
  }
  return self;
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.numel() == 0) return self;
  Below below;
  Lock lock(mutex);
  const Tensor& there = on_device(self) ? self : src;
  c10::DeviceGuard guard(there.device());
  if (!on_device(self) || !on_device(src)) return copy_with_host(self, src, non_blocking);
  Stream &s = current_stream(src.device().index()), &t = current_stream(self.device().index());
  std::vector<Tensor> read{as_cpu(src)}, written{as_cpu(self)};
  auto touch_both = [from = extent_of(src), to = extent_of(self)](Stream& u) {
    touch(from, false, u, "aten::copy_");
    touch(to, true, u, "aten::copy_");
  };
  if (s.recording) {
    s.recording->nodes.push_back({"aten::copy_", seconds_of("copy", read, written), touch_both,
                                  [written, read](const Offsets&) {
                                    Below below;
                                    auto e = extent_of(written[0]);
                                    unset_known_fill(e.start, e.nbytes);
                                    const_cast<Tensor&>(written[0]).copy_(read[0]);
                                  }});
    return self;
  }
  if (&s != &t) wait(s, record(t));  // between devices, both sides' streams wait
  drain(s);
  launch(s, "aten::copy_", seconds_of("copy", read, written));
  touch_both(s);
  Tensor made = at::empty_strided(self.sizes(), self.strides(), written[0].options());
  publish(s, self, made.copy_(read[0]));
  if (&s != &t) wait(t, record(s));
  return self;
}

// ---- fills, which read nothing

Tensor& fill_(Tensor& self, const Scalar& value) {
  Below below;
  Lock lock(mutex);
  c10::DeviceGuard guard(self.device());
  Stream& s = current_stream();
  Tensor place = as_cpu(self);
  Extent e = extent_of(self);
  // A whole block of zeros, such as one that keeps a device busy, is not written twice.
  const bool zeros = value.isIntegral(true) && value.toLong() == 0 && self.is_non_overlapping_and_dense();
  auto work = [place, e, value, zeros] {
    Below below;
    if (zeros && known_fill(e.start, e.nbytes, 0)) return;
    unset_known_fill(e.start, e.nbytes);
    const_cast<Tensor&>(place).fill_(value);
    if (zeros) set_known_fill(e.start, e.nbytes, 0);
  };
  auto touch_it = [e](Stream& t) { touch(e, true, t, "aten::fill_"); };
  double seconds = seconds_of("fill", {}, {place});
  if (s.recording) {
    s.recording->nodes.push_back({"aten::fill_", seconds, touch_it, [work](const Offsets&) { work(); }});
    return self;
  }
  launch(s, "aten::fill_", seconds);
  touch_it(s);
  push(s, work);
  return self;
}
Tensor& zero_(Tensor& self) { return testdevice::fill_(self, Scalar(0)); }

Scalar local_scalar(const Tensor& t) {
  Lock lock(mutex);
  Stream& s = current_stream(t.device().index());
  refuse_while_recording(s, "reading a number");
  drain(s);
  launch(s, "aten::_local_scalar_dense", link_seconds(t.itemsize()));
  touch(extent_of(t), false, s, "aten::_local_scalar_dense");
  synchronize(record(s), "aten::_local_scalar_dense");
  return at::native::_local_scalar_dense_cpu(as_cpu(t));
}

}  // namespace testdevice
