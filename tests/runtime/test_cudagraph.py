"""Replayed plans: the logic on a recorder that any device has, and the real one where there is CUDA."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat_executor import PlannedModule, allocator_peak
from remat_executor.lowering.runtime_protocol import GraphInterface
from remat_executor.runtime.cudagraph import CudaGraphs
from remat_executor.runtime.graph_recorder import PoolTensor
from remat_facade import Hiremate
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, Plan, Roofline
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
    """A recorder for the CPU.

    Attributes:
        played: the numbers of the records, in the order in which they ran.
        recorded: how many records there are.
        warmed: how many records there were when workspaces were taken.
        peak_nbytes: what the pool is said to hold.
    """

    peak_nbytes = 0

    def __init__(self) -> None:
        self.played: list[int] = []
        self.warmed: list[int] = []
        self.recorded = 0

    def warm_up(self) -> None:
        self.warmed.append(self.recorded)

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
    """Accepts any measured peak: tapes keep all memory."""

    def __init__(self, budget: str = "50%") -> None:
        self.planner = RecomputePlanner(budget=budget, method=Method(time_limit_s=1.0))

    def budget_for(self, graph: Graph) -> int:
        return AMPLE_NBYTES

    def asked_for(self, nbytes: int) -> int:
        return nbytes

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


def test_a_first_run_that_fails_is_no_warm_up(tape: list[Tape]) -> None:
    """The next run warms up, and the one after it is recorded."""
    graph = fx.Graph()
    tensors = graph.placeholder("tensors")
    one, other = (graph.call_function(getitem, (tensors, i)) for i in range(2))
    graph.output([graph.call_function(torch.ops.aten.mm.default, (one, other))])

    def new_tape() -> Tape:
        tape.append(Tape())
        return tape[-1]

    run = CudaGraphs(new_tape)(fx.GraphModule({}, graph), GraphInterface(stable_inputs=2, results=1))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run([torch.ones(2, 3), torch.ones(2, 3)])
    inputs = [torch.ones(2, 3), torch.ones(3, 2)]
    for recorded in (0, 1):
        (made,) = run(list(inputs))
        assert torch.equal(made, torch.full((2, 2), 3.0))
        assert recorded == tape[0].recorded


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


def test_what_a_recorded_step_is_said_to_need(tape: list[Tape], tmp_path: Any) -> None:
    """A replay's peak, and in addition what is held between steps: the pool and copies of the inputs."""
    found = []
    schedules = []
    for pool_nbytes in (0, 1 << 30):

        def new_tape(nbytes: int = pool_nbytes) -> Tape:
            tape.append(Tape())
            tape[-1].peak_nbytes = nbytes
            return tape[-1]

        module, x = network(), batch(0)
        runtimes = [CudaGraphs(new_tape)]
        options: dict[str, Any] = {"platform": Roofline(), "cache_dir": tmp_path}  # else plans may differ
        planned = PlannedModule(module, (x,), {}, AnyPeak(), runtime=runtimes.pop, **options)
        assert planned.rehearsed_nbytes is not None
        found.append(planned.rehearsed_nbytes)
        schedules.append(planned.plan.schedule)
        assert tape[-1].played == 2 * list(range(tape[-1].recorded))  # measured as it was replayed
    assert schedules[0] == schedules[1]
    assert found[1] - found[0] == 1 << 30
    copied_nbytes = x.nbytes + planned(x)[1].nbytes + 4  # the input and the tangents
    assert found[0] >= copied_nbytes


def test_workspaces_are_taken_before_anything_is_recorded(
    pair: tuple[PlannedModule, Network], tape: list[Tape]
) -> None:
    """Once for each graph, and again before it is recorded, since each may run in a thread of its own."""
    first, later = tape[0].warmed[: tape[0].recorded], tape[0].warmed[tape[0].recorded :]
    assert first == [0] * tape[0].recorded
    assert later == [*range(tape[0].recorded)]


class Strided(nn.Module):
    """Reads the memory of its input by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.as_strided((4, 8), (12, 1))).square().sum() + x.sum()


@pytest.mark.parametrize("kind", ["gaps", "repeated"])
def test_copies_of_inputs_have_their_strides(kind: str, tmp_path: Any) -> None:
    """Recorded views read what eager's read, also between the elements of the input."""
    model = Strided()
    original = copy.deepcopy(model)

    def given(seed: int) -> Tensor:
        whole = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        return whole[:, ::2] if kind == "gaps" else whole.view(64).as_strided((2, 60), (0, 1))

    planned = PlannedModule(
        model, (given(0),), {}, AnyPeak(budget="400%"), runtime=lambda: CudaGraphs(Tape), cache_dir=tmp_path
    )
    for seed in (0, 1, 2):
        assert torch.equal(planned(given(seed)), original(given(seed)))
    assert planned.runs["planned"] == 3


@pytest.mark.cuda
@pytest.mark.parametrize("index", [0, 1])
def test_memory_on_cuda(index: int, tmp_path: Any) -> None:
    """On any device: a replayed step needs what was measured, and no workspace is part of it."""
    if index >= torch.cuda.device_count():
        pytest.skip("has one device only")
    device = torch.device("cuda", index)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(device)
    x = torch.randn(512, 256, device=device)
    planned = Hiremate(model, x, "200%", runtime="cudagraph", cache_dir=tmp_path, time_limit_s=2.0)
    assert planned.rehearsed_nbytes is not None
    assert planned.rehearsed_nbytes < 16 << 20
    tangent = torch.ones_like(x)
    for _ in range(2):
        model.zero_grad()
        record = allocator_peak(lambda: planned(x).backward(tangent), device)
        assert record.peak_nbytes <= planned.rehearsed_nbytes


@pytest.mark.cuda
@pytest.mark.parametrize("budget", ["200%", "100%"])
def test_on_cuda(budget: str, tmp_path: Any) -> None:
    """Dropout and all: outputs, gradients and the generator bitwise as the eager runtime's, over steps.

    The pool is held while gradients arrive, so a recorded step needs more than its plan and
    recomputes at 100 %.
    """
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
