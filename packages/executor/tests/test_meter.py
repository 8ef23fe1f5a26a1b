"""The meter counts each storage once, from the op that made it to the going of its last owner."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from remat_executor import MemoryMeter

N = 1000
NBYTES = 4 * N


def test_saved_for_backward() -> None:
    """By hand: sin saves its input, cos saves sin's output, exp saves its own."""
    x = torch.randn(N, requires_grad=True)
    with MemoryMeter(x) as meter:
        a = x.sin()
        b = a.cos()
        c = b.exp()
        assert meter.live_nbytes == 3 * NBYTES
        del b
        assert meter.live_nbytes == 2 * NBYTES
        del a  # autograd still holds it
        assert meter.live_nbytes == 2 * NBYTES
        c.sum().backward()
    del c
    assert meter.live_nbytes == NBYTES  # x.grad
    assert meter.peak_nbytes >= 3 * NBYTES


def test_views_and_in_place_ops_are_free() -> None:
    """A storage is counted once, however many tensors see it."""
    with MemoryMeter() as meter:
        t = torch.empty(N)
        v = t.view(-1, 2).t().add_(1)
        s, u = t.split(N // 2)
        assert meter.live_nbytes == NBYTES
        del t, v, s
        assert meter.live_nbytes == NBYTES
        del u
    assert meter.live_nbytes == 0
    assert meter.peak_nbytes == NBYTES


def test_resize_is_followed() -> None:
    """A storage that grows or shrinks counts with its new size, also if it was there at entry."""
    old = torch.empty(N)
    with MemoryMeter() as meter:
        t = torch.empty(N)
        t.resize_(2 * N)
        assert meter.live_nbytes == 2 * NBYTES
        old.resize_(3 * N)
        assert meter.live_nbytes == 4 * NBYTES
        old.untyped_storage().resize_(0)
        old.detach()
        assert meter.live_nbytes == NBYTES


def test_made_bytes_stay_when_storages_go() -> None:
    """Each storage that an op made counts for good, once, and by what it grew; the baseline does not."""
    old = torch.zeros(N)
    with MemoryMeter(old) as meter:
        t = old + 1
        t.add_(1).view(-1, 2)
        assert meter.made_nbytes == NBYTES
        del t, old
        assert (meter.live_nbytes, meter.made_nbytes) == (-NBYTES, NBYTES)
        t = torch.empty(N)
        t.resize_(3 * N).resize_(N)  # a smaller shape keeps its storage
        assert meter.made_nbytes == 4 * NBYTES
        t.untyped_storage().resize_(0)
        t.detach()
    assert (meter.live_nbytes, meter.made_nbytes) == (-NBYTES, 4 * NBYTES)


def test_a_checkpoint_makes_its_activations_twice() -> None:
    """The bytes of a recomputation are counted, whatever the peak."""
    x = torch.randn(N, requires_grad=True)

    def made(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        with MemoryMeter(x) as meter:
            function(x).sum().backward()
        x.grad = None
        return meter.made_nbytes

    once = made(lambda x: x.sin().cos())
    again = made(lambda x: checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False))
    assert NBYTES == again - once  # sin alone: cos returns what nobody saved


def test_what_was_there_is_free() -> None:
    """A storage from before costs nothing, neither when a view of it is made nor when it is freed."""
    old = torch.zeros(N)
    with MemoryMeter() as meter:
        v = old.view(-1, 2)
        del old, v
        assert meter.live_nbytes == 0


def test_baseline_is_followed() -> None:
    """A storage of the baseline lowers the live bytes when it is freed; gradients belong to it."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    net(torch.randn(4, 8)).sum().backward()
    batch = {"x": [torch.zeros(N)]}
    inside = sum(t.nbytes for t in [*net.parameters(), *net.buffers()])
    grads = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    with MemoryMeter(net, batch) as meter:
        assert inside + grads + NBYTES == meter.baseline_nbytes
        net.zero_grad(set_to_none=True)
        assert -grads == meter.live_nbytes
        batch.clear()
        assert -grads - NBYTES == meter.live_nbytes


def test_peak_op_and_trace() -> None:
    """The peak names its op, and the trace has the bytes after each op."""
    with MemoryMeter(trace=True) as meter:
        torch.zeros(N).add(1)
        torch.ones(1)
    assert meter.trace is not None
    assert [op for op, _ in meter.trace] == ["aten.zeros.default", "aten.add.Tensor", "aten.ones.default"]
    assert meter.peak_op == "aten.add.Tensor"
    assert [nbytes for _, nbytes in meter.trace] == [NBYTES, 2 * NBYTES, 4]
    meter.reset_peak()
    assert (meter.peak_nbytes, meter.peak_op) == (0, "")


def test_flops_are_torchs() -> None:
    """FLOPs equal those of torch's own counter, also in inference mode."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    x = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    with MemoryMeter() as meter:
        net(x).sum().backward()
    assert counter.get_total_flops() == meter.flops > 0
    with torch.inference_mode(), MemoryMeter(trace=True) as meter, FlopCounterMode(display=False) as counter:
        net(x)
    assert counter.get_total_flops() == meter.flops > 0


def test_composite_ops_are_taken_apart_in_inference_mode() -> None:
    """Where autograd does not take them apart, the meter does, and so sees what is made inside."""
    x = torch.randn(10, 10)
    with torch.inference_mode(), MemoryMeter(trace=True) as meter:
        torch.nn.functional.linear(x, x)
    assert meter.trace is not None
    assert "aten.mm.default" in [op for op, _ in meter.trace]


class Twice(torch.autograd.Function):
    """Makes and drops temporaries both ways."""

    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x + 1) * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:
        Twice.threads.add(threading.get_ident())
        return g.clone() * 2


def test_inside_autograd_functions() -> None:
    """Temporaries of a custom forward and backward are seen."""
    x = torch.randn(N, requires_grad=True)
    with MemoryMeter(x) as meter:
        y = Twice.apply(x)
        assert (meter.peak_nbytes, meter.live_nbytes) == (2 * NBYTES, NBYTES)
        y.backward(torch.ones(N))
    assert meter.peak_nbytes == 4 * NBYTES  # y, its gradient, the clone, the result
    del y
    assert meter.live_nbytes == NBYTES


def test_in_the_engines_own_threads() -> None:
    """The backward that the engine moves to another thread is metered there."""

    def nested(depth: int, x: torch.Tensor) -> torch.Tensor:
        if depth == 0:
            return Twice.apply(x)
        result: torch.Tensor = checkpoint(lambda t: nested(depth - 1, t), x, use_reentrant=True)
        return result

    x = torch.randn(N, requires_grad=True)
    Twice.threads.clear()
    with MemoryMeter(x, trace=True) as meter:
        nested(70, x).sum().backward()  # the engine changes threads at 60 nested backwards
    assert Twice.threads.isdisjoint({threading.get_ident()})
    assert meter.trace is not None
    assert "aten.clone.default" in [op for op, _ in meter.trace]
    x.grad = None
    assert meter.live_nbytes == 0


class Wrapper(torch.Tensor):
    """A wrapper subclass that makes a temporary of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.inner.clone() if isinstance(a, Wrapper) else a for a in args]
        return Wrapper(func(*inner, **(kwargs or {})))


def test_wrapper_subclasses() -> None:
    """A wrapper counts as its inner tensors, and the ops that it turns into are seen."""
    x = Wrapper(torch.zeros(N))
    with MemoryMeter(x) as meter:
        assert meter.baseline_nbytes == NBYTES
        y = x + 1
        assert (meter.peak_nbytes, meter.live_nbytes) == (2 * NBYTES, NBYTES)
        del y
        assert meter.live_nbytes == 0


def test_tracing_under_a_meter() -> None:
    """Graphs can be captured under the meter, and fake tensors weigh nothing."""
    net = torch.nn.Linear(10, 10)
    x = torch.randn(4, 10)
    with MemoryMeter(net, x) as meter:
        exported = torch.export.export(net, (x,))
        compiled = torch.compile(net, backend="aot_eager")
        assert meter.peak_nbytes < NBYTES
        y = compiled(x)
    assert "call_function" in [node.op for node in exported.graph.nodes]
    assert torch.equal(net(x), y)


def test_other_devices_do_not_count() -> None:
    """A meter watches one device."""
    with MemoryMeter(device="cuda:1") as other, MemoryMeter(device="cpu") as here:
        x = torch.zeros(N)
        y = torch.zeros(N, device="meta")
    assert (other.live_nbytes, here.live_nbytes) == (0, NBYTES)
    del x, y


def test_nested_meters_agree() -> None:
    """One meter inside another changes the count of neither."""
    with MemoryMeter() as outer, MemoryMeter() as inner:
        torch.zeros(N).add(1)
    assert 2 * NBYTES == outer.peak_nbytes == inner.peak_nbytes


def test_an_error_leaves_the_count_right() -> None:
    """An op that raises makes nothing live, and the meter can be entered again."""
    meter = MemoryMeter()
    with pytest.raises(RuntimeError), meter:
        torch.zeros(2) + torch.zeros(3)
    with meter:
        x = torch.zeros(N)
    assert meter.live_nbytes == NBYTES
    del x


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["make", "view", "write", "drop"]), st.integers(0, 9)), max_size=40
    )
)
def test_any_sequence(steps: list[tuple[str, int]]) -> None:
    """Whatever is made, viewed, written and dropped, live bytes are those of the distinct live storages."""
    held: list[torch.Tensor] = []
    with MemoryMeter() as meter:
        peak = 0
        for what, index in steps:
            if what == "make":
                held.append(torch.zeros(index + 1))
            elif held:
                tensor = held[index % len(held)]
                if what == "view":
                    held.append(tensor[:1])
                elif what == "write":
                    tensor.add_(1)
                else:
                    del held[index % len(held)]
                del tensor
            live = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
            peak = max(peak, live)
            assert live == meter.live_nbytes
        assert peak == meter.peak_nbytes


@pytest.mark.cuda
def test_on_cuda() -> None:
    """The same by-hand count on a GPU, whose backward runs in the engine's thread."""
    x = torch.randn(N, requires_grad=True, device="cuda")
    with MemoryMeter(x, device="cuda") as meter:
        y = Twice.apply(x)
        y.backward(torch.ones(N, device="cuda"))
        del y
    assert (meter.peak_nbytes, meter.live_nbytes) == (4 * NBYTES, NBYTES)
