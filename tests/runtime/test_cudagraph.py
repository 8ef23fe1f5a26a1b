"""Replayed plans: the logic on a recorder that any device has, and the real one where there is CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat_executor import PlannedModule
from remat_executor.runtime.cudagraph import CudaGraphs, PoolTensor
from remat_facade import Hiremate
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, Plan
from tests.helpers.planners import AMPLE_NBYTES


def on(place: PoolTensor) -> Tensor:
    """A tensor on memory that something else owns."""
    if place.nbytes == 0:
        return torch.empty(place.size, dtype=place.dtype)
    whole = torch.frombuffer((ctypes.c_byte * place.nbytes).from_address(place.address), dtype=torch.uint8)
    return whole.view(place.dtype).as_strided(place.size, place.stride, place.offset)


class Taping(TorchDispatchMode):
    """Notes every operator with its tensors, which keep their memory; undoes what is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = tree_map_only(Tensor, lambda t: on(PoolTensor.of(t)), (args, kwargs))
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((named[argument.name], named[argument.name].clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for tensor, content in reversed(self.before):
            tensor.copy_(content)

    def play(self) -> None:
        for func, args, kwargs, out in self.calls:
            results = tree_leaves(func(*args, **kwargs))
            for kept, new in zip(tree_leaves(out), results, strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class Tape:
    """A recorder for the CPU."""

    def __init__(self) -> None:
        self.played: list[int] = []
        self.recorded = 0

    def holds(self, tensor: Tensor) -> bool:
        return True

    def record(
        self, work: Callable[[], list[Tensor]], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        taping, number = Taping(), self.recorded
        self.recorded += 1
        with taping:
            results = work()
        taping.undo()

        def play() -> None:
            self.played.append(number)
            taping.play()

        return [on(PoolTensor.of(result)) for result in results], play

    def at(self, place: PoolTensor) -> Tensor:
        return on(place)


class Network(nn.Module):
    """Linear layers, a train-mode batch norm, in-place activations; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 64), (64, 64), (64, 64), (64, 64)]
        layers = [[nn.Linear(*size), nn.BatchNorm1d(64), nn.ReLU(inplace=True)] for size in sizes]
        self.layers = nn.Sequential(*(layer for block in layers for layer in block))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.head(self.layers(x))
        return x.square().mean(), x


def network() -> Network:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network()


def batch(seed: int) -> Tensor:
    """A batch of vectors."""
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tape() -> list[Tape]:
    """The recorders of a test."""
    return []


class AnyPeak:
    """Plans at half the memory and accepts any measured peak: tapes keep all memory."""

    def __init__(self) -> None:
        self.planner = RecomputePlanner(budget="50%", method=Method(time_limit_s=1.0))

    def budget_for(self, graph: Graph) -> int:
        return AMPLE_NBYTES

    def with_margin(self, nbytes: int) -> AnyPeak:
        raise AssertionError("any peak fits")

    def __call__(self, graph: Graph) -> Plan:
        return self.planner(graph)


@pytest.fixture
def pair(tape: list[Tape], tmp_path: Any) -> tuple[PlannedModule, Network]:
    """A recorded module at a budget that recomputes, and the original."""

    def new_tape() -> Tape:
        tape.append(Tape())
        return tape[-1]

    def runtime() -> CudaGraphs:
        return CudaGraphs(new_tape)

    planned = PlannedModule(network(), (batch(0),), {}, AnyPeak(), runtime=runtime, cache_dir=tmp_path)
    assert len(tape) == 1
    assert tape[0].recorded > 2
    return planned, network()


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradients, taken off the module."""
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def equal(planned: nn.Module, original: nn.Module) -> bool:
    """Whether gradients and buffers are the same bits."""
    pairs = [*zip(gradients(planned), gradients(original), strict=True)]
    pairs += [*zip(planned.buffers(), original.buffers(), strict=True)]
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def test_replays_are_exact(pair: tuple[PlannedModule, Network], tape: list[Tape]) -> None:
    """Every part is replayed on new batches; what the caller was given earlier stays as it was."""
    planned, original = pair
    earlier = []
    for seed in range(1, 4):
        tape[0].played.clear()
        outputs, expected = planned(batch(seed)), original(batch(seed))
        outputs[0].backward()
        expected[0].backward()
        assert tape[0].played == list(range(tape[0].recorded))
        earlier.append((outputs, expected, gradients(planned), gradients(original)))
    for outputs, expected, found, wanted in earlier:
        assert all(map(torch.equal, outputs, expected))
        assert all(map(torch.equal, found, wanted))
    assert len(tape) == 1


@pytest.mark.filterwarnings("ignore:called again before:remat_executor.RematWarning")
def test_a_second_call_in_flight(pair: tuple[PlannedModule, Network], tape: list[Tape]) -> None:
    """Runs unrecorded beside the first: both are exact, in any order of their backwards."""
    planned, original = pair
    for order in ((0, 1), (1, 0)):
        calls = [[module(batch(seed))[0] for seed in (1, 2)] for module in (planned, original)]
        for losses in calls:
            for which in order:
                losses[which].backward()
        assert torch.equal(calls[0][0], calls[1][0])
        assert torch.equal(calls[0][1], calls[1][1])
        assert equal(planned, original)
    assert len(tape) == 1


def test_a_backward_that_keeps_its_graph(pair: tuple[PlannedModule, Network]) -> None:
    """Twice the same gradients, and the next call is replayed again."""
    planned, original = pair
    for module in pair:
        loss = module(batch(1))[0]
        loss.backward(retain_graph=True)
        loss.backward()
    assert equal(planned, original)
    for module in pair:
        module(batch(2))[0].backward()
    assert equal(planned, original)


def test_a_call_without_backward(pair: tuple[PlannedModule, Network], tape: list[Tape]) -> None:
    """Its saved values are given up with its output, and the next call is replayed."""
    planned, original = pair
    for module in pair:
        module(batch(1))
    tape[0].played.clear()
    for module in pair:
        module(batch(2))[0].backward()
    assert equal(planned, original)
    assert tape[0].played == list(range(tape[0].recorded))


def test_parameters_that_move(pair: tuple[PlannedModule, Network], tape: list[Tape]) -> None:
    """Written in place they are read anew; put elsewhere, the program is recorded again."""
    planned, original = pair
    for _ in range(2):
        for module in pair:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
            module(batch(1))[0].backward()
        assert equal(planned, original)
    assert len(tape) == 1
    for module in pair:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone() * 0.5
    for seed in (1, 2):
        for module in pair:
            module(batch(seed))[0].backward()
        assert equal(planned, original)
    assert len(tape) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_on_cuda(budget: str, tmp_path: Any) -> None:
    """Dropout and all: outputs, gradients and the generator bitwise as the eager runtime's, over steps."""
    layers = [[nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)] for _ in range(6)]
    model = nn.Sequential(*(layer for block in layers for layer in block)).cuda()
    sample = torch.randn(512, 256, device="cuda")
    runs = []
    for runtime in ("eager", "cudagraph"):
        planned = Hiremate(model, sample, budget, runtime=runtime, cache_dir=tmp_path, time_limit_s=2.0)
        torch.manual_seed(1)
        found: list[Tensor | None] = []
        for seed in range(3):
            x = torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            loss = planned(x).square().mean()
            loss.backward()
            found += [loss.detach(), *gradients(model)]
        runs.append([*found, torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *runs))
