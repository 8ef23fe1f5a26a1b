"""Ctrl-C during capture, measuring, planning and lowering leaves everything as it was."""

import gc
import itertools
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat_executor
from remat_executor import allocator_peak
from remat_executor.costs.cache import CostCache
from remat_executor.guards.global_flags import global_flags
from remat_executor.inspection import read_recorder
from remat_executor.inspection.read_recorder import ReadRecorder
from remat_executor.inspection.reads import EVERYTHING
from remat_executor.memory import allocator
from remat_executor.torch_private.profiler import profiler_running
from remat_facade import Rockmate, limit_memory, planned, release
from tests.helpers.interrupts import Interrupt

SOURCES = tuple(str(path) for path in Path(remat_executor.__file__).parent.rglob("*.py"))
PLACES = 16  # of the interrupts, over all lines of the executor that a build runs

Build = Callable[[nn.Module, Tensor, Path], object]


def build_around(model: nn.Module, x: Tensor, folder: Path) -> object:
    """A planned module around the model."""
    return Rockmate(model, x, "100%", cache_dir=folder, zoo=False)


def build_in_place(model: nn.Module, x: Tensor, folder: Path) -> object:
    """The model itself, planned at once."""
    return limit_memory(model, "100%", sample=x, cache_dir=folder, zoo=False)


def undo(net: nn.Module) -> None:
    """Give the model its own class back, if it was planned in place."""
    if planned(net) is not None:
        release(net)


def model() -> nn.Module:
    """With buffers, draws and a submodule in another mode."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh()
    )
    net[3].eval()
    return net


def module_state(net: nn.Module) -> list[Any]:
    """Classes, attributes, modes, hooks and tensors of all submodules."""
    found: list[Any] = []
    for name, module in net.named_modules():
        plain = {
            key: value for key, value in module.__dict__.items() if isinstance(value, bool | int | float)
        }
        containers = {key: list(value) for key, value in module.__dict__.items() if isinstance(value, dict)}
        found.append((name, type(module), sorted(module.__dict__), plain, containers))
    tensors = [*net.parameters(), *net.buffers()]
    return [*found, [(id(t), t._version, t.tolist(), t.grad, t.requires_grad) for t in tensors]]


def process_state() -> list[Any]:
    """Generators, global flags, handlers, and what a new tensor is."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        global_flags(torch.device("cpu")),
        gc.get_threshold(),
        gc.isenabled(),
        signal.getsignal(signal.SIGINT),
        list(warnings.filters),
        type(torch.ones(1) + 1),
        profiler_running(),
    ]


@pytest.mark.parametrize("build", [build_around, build_in_place])
def test_everything_is_as_it_was(tmp_path: Path, build: Build) -> None:
    """Wherever the build is interrupted; the costs that it measured can be read, and it succeeds again."""
    net, x = model(), torch.randn(4, 8)
    counter = Interrupt(10**9, SOURCES)
    assert not counter.during(lambda: build(net, x, tmp_path / "first"))
    undo(net)
    lines = 10**9 - counter.left
    before = module_state(net), process_state()
    done = 0
    for place in range(1, lines, lines // PLACES):
        folder = tmp_path / str(place)
        if Interrupt(place, SOURCES).during(lambda folder=folder: build(net, x, folder)):
            done += 1
        else:  # measuring took fewer lines
            undo(net)
        assert before == (module_state(net), process_state()), place
        CostCache(torch.device("cpu"), folder).get(["none"])  # a warning about a damaged file is an error
        assert not list(folder.rglob("*.tmp*"))
    assert done > PLACES // 2
    other = model()
    build(other, x, tmp_path / "first")
    expected = model()
    torch.testing.assert_close(expected(x), other(x), rtol=0, atol=0)


def test_every_line_of_reading_the_allocator() -> None:
    """Also where the `with` of the profiler has ended its body and not yet called its exit."""
    files, before = (str(allocator.__file__),), process_state()
    lines = itertools.count(1)
    while Interrupt(next(lines), files).during(lambda: allocator_peak(lambda: torch.empty(8))):
        assert before == process_state()
    assert next(lines) > 20
    assert 32 == allocator_peak(lambda: torch.empty(8)).peak_nbytes


def test_the_recorder_of_reads_leaves_no_class_changed() -> None:
    """At each line until it records; later recordings see reads again."""
    net = model()
    kinds = {type(module) for module in net.modules()} | {nn.Module}
    before = {kind: vars(kind).get("__getattribute__") for kind in kinds}
    entered: list[int] = []
    counter = Interrupt(10**9, (read_recorder.__file__,))

    def record() -> ReadRecorder:
        recorder = ReadRecorder()
        with recorder.recording(net):
            entered.append(10**9 - counter.left)
            net[0].bias  # noqa: B018
        return recorder

    assert not counter.during(record)
    assert entered[0] > 20
    for line in range(1, entered[0] + 1):
        assert Interrupt(line, (read_recorder.__file__,)).during(record), line
        assert before == {kind: vars(kind).get("__getattribute__") for kind in kinds}, line
        assert record().reads != EVERYTHING, line
