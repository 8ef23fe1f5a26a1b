"""Measured costs: of the right size, one key at a time, kept, and without a trace on the user's state."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch

import remat_executor.costs.measure as measuring
from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.device_timer import Seconds
from remat_executor.costs.failures import MeasureError
from remat_executor.costs.measure import measure
from remat_executor.costs.stopwatch import HostClocks, lower_quartile, seconds_of

aten = torch.ops.aten
Factory = Callable[[], Callable[[], object]]


def unary(op: Callable[[torch.Tensor], object], *shape: int) -> Factory:
    def factory() -> Callable[[], object]:
        x = torch.randn(*shape)
        return lambda: op(x)

    return factory


def convolution(backward: bool) -> Factory:
    def factory() -> Callable[[], object]:
        x, w = torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)
        sizes = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        if not backward:
            return lambda: aten.convolution(x, w, None, *sizes)
        return lambda: aten.convolution_backward(x, x, w, None, *sizes, [True, True, False])

    return factory


def test_bytes() -> None:
    """Outputs count with their bytes, views with none; a convolution needs a workspace, a relu none."""
    costs = measure(
        {
            "relu": unary(aten.relu, 1000),
            "view": unary(lambda x: x.view(-1), 10, 10),
            "max": unary(lambda x: aten.max.dim(x, 0), 10, 10),
            "in place": unary(aten.relu_, 1000),
            "nothing": lambda: lambda: None,
            "conv": convolution(backward=False),
            "conv backward": convolution(backward=True),
        }
    )
    held = {key: cost.output_nbytes for key, cost in costs.items()}
    x, w = 4 * 8 * 64 * 32 * 32, 4 * 64 * 64 * 3 * 3
    assert {
        "relu": 4000,
        "view": 0,
        "max": 120,
        "in place": 0,
        "nothing": 0,
        "conv": x,
        "conv backward": x + w,
    } == held
    workspaces = {key: cost.workspace_nbytes for key, cost in costs.items()}
    assert {"relu": 0, "view": 0, "max": 0, "in place": 0, "nothing": 0}.items() <= workspaces.items()
    assert workspaces["conv"] >= x // 2
    assert workspaces["conv backward"] >= x // 2


def test_scratch_that_an_op_frees_before_its_output_is_made() -> None:
    """Workspace is what the peak has beyond the outputs, not all that was ever allocated."""

    def work() -> torch.Tensor:
        torch.empty(1000)
        return torch.empty(600)

    def more() -> torch.Tensor:
        held = torch.empty(1000)
        made = torch.empty(600)
        del held
        return made

    costs = measure({"before": lambda: work, "during": lambda: more})
    assert (costs["before"].output_nbytes, costs["before"].workspace_nbytes) == (2400, 1600)
    assert (costs["during"].output_nbytes, costs["during"].workspace_nbytes) == (2400, 4000)


def test_times_are_of_one_run() -> None:
    """A thunk costs what one run takes, its runs grouped or not, by a clock that only it moves."""
    now_s = 0.0

    def taking(seconds: float) -> Factory:
        def run() -> None:
            nonlocal now_s
            now_s += seconds

        return lambda: run

    seconds = {"10 us": 1e-5, "1 ms": 1e-3, "30 ms": 3e-2}
    clock = HostClocks(passed=lambda: now_s, worked=lambda: now_s)
    costs = measure({key: taking(s) for key, s in seconds.items()}, clock=clock)
    assert {key: cost.time_s for key, cost in costs.items()} == pytest.approx(seconds)
    assert {0.0} == {cost.issue_s for cost in costs.values()}  # on the CPU an op runs when it is issued


def test_times_of_issuing() -> None:
    """A timer gives two times, and both are of one run; an accelerator's cost has the lower quartiles."""
    given = iter(Seconds(1e-5, 1e-6 * us) for us in (5, 11, 10, 9, 8, 12))

    @attrs.define
    class Timer:
        def seconds(self, run: Callable[[], object], runs: int = 1) -> Seconds:
            return next(given)

    found = seconds_of(lambda: None, Timer(), lower_quartile)
    assert found == pytest.approx(Seconds(1e-5, 9e-6))


@pytest.mark.parametrize(("key", "runs"), [("aten.mm", 1), ("again: aten.mm", 1), ("my_op", 3)])
def test_a_long_operator_is_not_run_often(key: str, runs: int) -> None:
    """One of torch's once; one that may compile itself at its first run as often as it must."""
    seen: list[int] = []
    now_s = 0.0

    def long() -> torch.Tensor:
        nonlocal now_s
        seen.append(1)
        now_s += 0.12
        return torch.empty(100)

    clock = HostClocks(passed=lambda: now_s, worked=lambda: now_s)
    cost = measure({key: lambda: long}, clock=clock)[key]
    assert len(seen) == runs
    assert cost.time_s == pytest.approx(0.12)
    assert cost.output_nbytes == 400


def test_one_key_at_a_time() -> None:
    """Inputs of a key are gone before the next key's are made, so that a large model can be measured."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def factory() -> Callable[[], object]:
        assert all(reference() is None for reference in alive)
        x = torch.randn(10)
        alive.append(weakref.ref(x))
        return lambda: x + 1

    gc.disable()  # by reference counts alone
    try:
        measure({str(index): factory for index in range(5)})
    finally:
        gc.enable()
    assert len(alive) == 5


def test_cached_keys_are_not_run(tmp_path: Path) -> None:
    """A second measuring takes its numbers from the cache, in the order asked for, and runs what is new."""
    first = measure({"a": unary(aten.relu, 10), "b": unary(aten.exp, 10)}, cache=CostCache(folder=tmp_path))

    def never() -> Callable[[], object]:
        raise AssertionError("called although its cost is known")

    again = measure({"b": never, "c": unary(aten.cos, 10), "a": never}, cache=CostCache(folder=tmp_path))
    assert list(again) == ["b", "c", "a"]
    assert first == {key: again[key] for key in first}


def test_progress() -> None:
    """Progress begins with what is known and ends with the total."""
    seen: list[tuple[int, int]] = []
    measure(
        {"a": unary(aten.relu, 1), "b": unary(aten.exp, 1)}, on_progress=lambda *counts: seen.append(counts)
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_random_state_is_untouched() -> None:
    """Random inputs and random ops leave the user's generator where it was."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    measure({"dropout": unary(lambda x: aten.native_dropout(x, 0.5, True), 100)})
    assert torch.equal(expected, torch.rand(3))


def test_modes_of_the_caller_do_not_matter() -> None:
    """Autocast and grad mode are off while an op runs: what is measured is the op as it is lowered."""
    seen: list[tuple[bool, torch.dtype]] = []

    def factory() -> Callable[[], object]:
        x = torch.randn(4, 4, requires_grad=True)

        def thunk() -> torch.Tensor:
            y = x @ x
            seen.append((y.requires_grad, y.dtype))
            return y

        return thunk

    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure({"mm": factory})
        assert torch.is_autocast_enabled("cpu")
    assert {(False, torch.float32)} == set(seen)


def failing() -> Callable[[], object]:
    raise RuntimeError("no kernel\nand many lines more")


@pytest.mark.parametrize("factory", [failing, lambda: failing])
def test_failure_names_the_key(factory: Factory, tmp_path: Path) -> None:
    """An op that fails is named in one line, and what was measured before it is kept."""
    cache = CostCache(folder=tmp_path)
    with pytest.raises(MeasureError) as caught:
        measure({"good": unary(aten.relu, 10), "aten.bad(f32[3])": factory}, cache=cache)
    assert str(caught.value) == (
        "cannot measure aten.bad(f32[3]): RuntimeError: no kernel; "
        "if the model alone takes these inputs, plan the parts around this operator and report it"
    )
    assert list(CostCache(folder=tmp_path).get(["good", "aten.bad(f32[3])"])) == ["good"]


def test_a_shortage_has_its_own_advice() -> None:
    """Who runs out of memory is told to free some, not to report the operator."""

    def exhausted() -> Callable[[], object]:
        raise torch.OutOfMemoryError("tried to allocate 8 GiB\nand much advice")

    with pytest.raises(MeasureError) as caught:
        measure({"aten.mm": exhausted})
    assert str(caught.value) == (
        "cannot measure aten.mm: OutOfMemoryError: tried to allocate 8 GiB; this operator alone, with its "
        "inputs and outputs, must fit in what is free: free memory, also that of other processes, or take a "
        "smaller batch"
    )


def test_what_is_replaceable_and_does_not_fit_is_left_out(tmp_path: Path) -> None:
    """Nothing is saved of it; any other failure is an error all the same."""
    wants, cache = [True], CostCache(folder=tmp_path)

    def factory() -> Callable[[], object]:
        if wants[0]:
            raise torch.OutOfMemoryError("tried to allocate 8 GiB")
        return lambda: torch.ones(1)

    def wrong() -> Callable[[], object]:
        raise ValueError("no such size")

    requests: dict[str, Factory] = {"large": factory, "relu": unary(torch.relu, 8)}
    assert list(measure(requests, cache=cache, replaceable={"large"})) == ["relu"]
    with pytest.raises(MeasureError, match="no such size"):
        measure({"large": wrong}, replaceable={"large"})
    wants[0] = False
    assert list(measure(requests, cache=cache)) == ["large", "relu"]


def test_the_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are made and ops run with their device as the current one, on whose stream events record."""
    current: list[int | None] = [0]

    @contextlib.contextmanager
    def device_index(index: int | None) -> Iterator[None]:
        current.append(current[-1] if index is None else index)
        try:
            yield
        finally:
            current.pop()

    def refuse() -> Callable[[], object]:
        raise ValueError(f"device {current[-1]}")

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(measuring, "preserved_generators", lambda _: contextlib.nullcontext())
    for device, index in (("cuda:1", 1), ("cuda", 0), ("cpu", 0)):
        with pytest.raises(MeasureError, match=f"device {index}"):
            measure({"aten.mm": refuse}, device)
    assert current == [0]


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """Ctrl-C passes through, and the costs measured so far are on disk."""

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    requests = {"a": unary(aten.relu, 10), "b": unary(aten.exp, 10)}
    with pytest.raises(KeyboardInterrupt):
        measure(requests, cache=CostCache(folder=tmp_path), on_progress=interrupt)
    assert list(CostCache(folder=tmp_path).get(requests)) == ["a"]


@pytest.mark.cuda
def test_on_another_device() -> None:
    """An op on a device that is not the current one is timed there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")

    def product() -> Callable[[], object]:
        x = torch.randn(2048, 2048, device="cuda:1")
        return lambda: x @ x

    with torch.cuda.device(0):
        other = measure({"mm": product}, "cuda:1")["mm"]
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        same = measure({"mm": product}, "cuda:1")["mm"]
    assert same.time_s / 2 < other.time_s < 2 * same.time_s


@pytest.mark.cuda
def test_on_cuda() -> None:
    """Events time the device, statistics count its bytes, and its generator is restored."""
    torch.cuda.manual_seed(7)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)

    def product() -> Callable[[], object]:
        x = torch.randn(512, 512, device="cuda")
        return lambda: x @ x

    def dropout() -> Callable[[], object]:
        x = torch.randn(1024, device="cuda")
        return lambda: aten.native_dropout(x, 0.5, True)

    costs = measure({"mm": product, "dropout": dropout}, "cuda")
    assert costs["mm"].output_nbytes == 4 * 512 * 512
    assert all(cost.time_s > 0 for cost in costs.values())
    assert all(0 < cost.issue_s < 0.1 for cost in costs.values())
    assert torch.equal(expected, torch.rand(3, device="cuda"))


def test_cost_refuses_nonsense() -> None:
    """A negative cost is no cost."""
    with pytest.raises(ValueError, match="time_s"):
        MeasuredCost(time_s=-1.0, workspace_nbytes=0, output_nbytes=0)
