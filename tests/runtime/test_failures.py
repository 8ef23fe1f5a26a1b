"""What fails in the middle of a step holds no memory, corrupts nothing, and the next step is right."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor import MemoryMeter, PlannedModule, RematWarning
from remat_facade import Hiremate
from remat_graph import format_nbytes
from tests.helpers.planners import repeat_at_random


class Block(nn.Module):
    """Batch norm, dropout and a residual; several parts of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(self.norm(x)).relu())
        return x.square().mean()


class Planted(Exception):
    """What the tests throw."""


class Fail(TorchDispatchMode):
    """Throws instead of running an op, after letting some pass."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = after, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.Module, PlannedModule]:
    """An untouched copy, and the planned module."""
    torch.manual_seed(0)
    model = Block().train()
    return copy.deepcopy(model), PlannedModule(
        model, (_batch(),), {}, repeat_at_random(12), cache_dir=tmp_path
    )


def _batch() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def _step(module: nn.Module, batch: Tensor) -> Tensor:
    module.zero_grad()
    torch.manual_seed(3)
    loss: Tensor = module(batch)
    loss.backward()
    return loss.detach()


def _let_go(module: nn.Module) -> None:
    """Drop what a step that failed had delivered; torch's engine keeps its queue until its next backward."""
    module.zero_grad()
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


def _assert_next_step_is_right(original: nn.Module, planned: PlannedModule) -> None:
    """As eager from the same buffers: a step that failed may have moved the statistics, as eager's does."""
    original.load_state_dict(planned.state_dict())
    assert torch.equal(_step(original, _batch()), _step(planned, _batch()))
    for (name, expected), actual in zip(original.named_parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad), name
    for (name, buffer), after in zip(original.named_buffers(), planned.buffers(), strict=True):
        assert torch.equal(buffer, after), name
    assert planned.runs["original"] == 0


def _ops(planned: PlannedModule) -> int:
    """How many ops a step dispatches."""
    counting, batch = Fail(-1, Planted), _batch()
    with counting:
        _step(planned, batch)
    return -1 - counting.left


def _places(count: int) -> Iterator[int]:
    """Some places all over a step, the first and the last among them."""
    yield from range(0, count, max(1, count // 12))
    yield count - 1


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(Planted, id="exception"),
        pytest.param(KeyboardInterrupt, id="interrupt", marks=pytest.mark.full),
        pytest.param(torch.OutOfMemoryError, id="memory", marks=pytest.mark.full),
    ],
)
def test_an_error_in_any_op(pair: tuple[nn.Module, PlannedModule], error: type[BaseException]) -> None:
    """In the forward or the backward: all that the step made is freed, and the next one is right."""
    original, planned = pair
    batch = _batch()
    notes: list[str] = []
    for place in _places(_ops(planned)):
        planned.zero_grad()
        gc.collect()
        meter = MemoryMeter(planned, batch)
        with pytest.raises(error) as caught, meter, Fail(place, error):
            _step(planned, batch)
        notes += getattr(caught.value, "__notes__", [])
        del caught
        _let_go(planned)
        assert meter.live_nbytes == 0, place
    _assert_next_step_is_right(original, planned)
    needs = f"remat: the plan needs {format_nbytes(planned.plan.peak_nbytes)}"
    assert bool(notes) == (error is torch.OutOfMemoryError)
    assert all(note.startswith(needs) for note in notes)


def test_gradients_are_whole_or_none(pair: tuple[nn.Module, PlannedModule]) -> None:
    """A gradient that was delivered before an error is the right one."""
    _, planned = pair
    count, batch = _ops(planned), _batch()
    right = {name: p.grad.clone() for name, p in planned.named_parameters() if p.grad is not None}
    state = copy.deepcopy(planned.state_dict())
    delivered = set()
    for place in _places(count):
        planned.load_state_dict(state)
        with pytest.raises(Planted), Fail(place, Planted):
            _step(planned, batch)
        for name, parameter in planned.named_parameters():
            if parameter.grad is not None:
                delivered.add(name)
                assert torch.equal(parameter.grad, right[name]), (place, name)
    assert delivered


def test_an_error_in_a_gradient_hook(pair: tuple[nn.Module, PlannedModule]) -> None:
    """A hook of the user's that throws between two parts."""
    original, planned = pair
    parameter = next(iter(planned.parameters()))

    def throw(gradient: Tensor) -> None:
        raise Planted

    handle = parameter.register_hook(throw)
    meter = MemoryMeter(planned)
    with pytest.raises(Planted), meter:
        _step(planned, _batch())
    handle.remove()
    _let_go(planned)
    assert meter.live_nbytes == 0
    _assert_next_step_is_right(original, planned)


def test_a_backward_that_never_comes(pair: tuple[nn.Module, PlannedModule]) -> None:
    """Many forwards whose outputs are dropped hold nothing."""
    original, planned = pair
    with MemoryMeter(planned) as meter:
        for _ in range(5):
            planned(_batch())
        gc.collect()
        assert meter.live_nbytes == 0
    _assert_next_step_is_right(original, planned)


@pytest.fixture
def two_threads() -> Iterator[ThreadPoolExecutor]:
    """Two Python threads whose operators run on one thread each.

    A thread's first product runs on all cores, whatever `set_num_threads` says, until something asks it for
    their number: in eager too its last bits are others then.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(2, initializer=torch.get_num_threads) as threads:
        yield threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [8, 5], ids=["same shape", "another shape"])
def test_both_run_at_once(rows: int, two_threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Two threads run the same module at once, forward and backward, and get what eager gives."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
    batches = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (8, rows)]
    eager = copy.deepcopy(model)
    planned = PlannedModule(model, (batches[0],), {}, repeat_at_random(4), cache_dir=tmp_path)
    expected = [
        torch.autograd.grad(eager(batch).square().sum(), list(eager.parameters())) for batch in batches
    ]

    def work(batch: Tensor, right: tuple[Tensor, ...]) -> bool:
        found = (
            torch.autograd.grad(planned(batch).square().sum(), list(planned.parameters())) for _ in range(30)
        )
        return all(all(map(torch.equal, gradients, right)) for gradients in found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # it says once that it plans again
        assert list(two_threads.map(work, batches, expected)) == [True, True]
    assert planned.runs["planned"] == 60
    assert planned.runs["original"] == 0
    assert planned.runs["replanned"] == (rows != 8)


def test_the_tensors_are_the_users_own_while_another_thread_captures(tmp_path: Path) -> None:
    """Whoever asks for parameters, buffers or the state meanwhile waits, and never sees a stand-in."""
    inside, gate = threading.Event(), threading.Event()

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert gate.wait(60)
            return cast(Tensor, self.layer(x) * self.scale)

    gate.set()
    model = Gated()
    own = [*model.parameters(), *model.buffers()]
    planned = PlannedModule(model, (torch.randn(4, 8),), {}, repeat_at_random(0), cache_dir=tmp_path)
    gate.clear()
    inside.clear()
    with ThreadPoolExecutor(3) as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # it says once that it plans again
        step = threads.submit(lambda: planned(torch.randn(5, 8)).sum().backward())
        assert inside.wait(60)
        asked = threads.submit(lambda: [*planned.parameters(), *planned.buffers()])
        state = threads.submit(planned.state_dict)
        assert not wait([asked, state], timeout=0.2).done
        gate.set()
        step.result()
        assert all(found is right for found, right in zip(asked.result(), own, strict=True))
        assert all(type(tensor) is Tensor for tensor in state.result().values())


class Trap:
    """Throws at its nth run from now on; never while n is 0."""

    left = 0

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Planted


TRAP = Trap()


@torch.library.custom_op("remat_tests::trapped", mutates_args=())
def trapped(x: Tensor) -> Tensor:
    """A copy, unless the trap is sprung; a compiler leaves it where it is."""
    TRAP()
    return x.clone()


trapped.register_fake(torch.empty_like)
trapped.register_autograd(lambda _, gradient: trapped(gradient))


class Trapped(nn.Module):
    """Layers with a trap behind each, in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = trapped(torch.dropout(layer(x), 0.2, train=True).relu())
        return x.square().mean()


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("place", [1, 3, 4, 6])
@pytest.mark.parametrize("runtime", ["eager", "inductor"])
def test_an_error_in_any_runtime(runtime: str, place: int, tmp_path: Path) -> None:
    """Three traps in the forward, three in the backward: no tensor stays, and the next step is right."""
    torch.manual_seed(0)
    model, batch = Trapped(), _batch()
    planned = Hiremate(model, batch, "1MiB", runtime=runtime, cache_dir=tmp_path, time_limit_s=1.0)
    right = _step(planned, batch), [p.grad.clone() for p in planned.parameters() if p.grad is not None]
    _let_go(planned)
    before = _tensors()
    TRAP.left = place
    with pytest.raises(Planted):
        _step(planned, batch)
    _let_go(planned)
    assert _tensors() == before
    assert torch.equal(_step(planned, batch), right[0])
    assert all(map(torch.equal, (p.grad for p in planned.parameters()), right[1]))
