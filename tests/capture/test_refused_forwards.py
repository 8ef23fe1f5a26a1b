"""Forwards that branch on data, draw from Python or keep state are refused, or their state is put back."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat_executor import CaptureError, RematWarning
from remat_executor.torch_private.capture import export_joint
from tests.helpers.steps import assert_same_step, pair


class Branch(nn.Module):
    """Branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Draws(nn.Module):
    """Draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()


def test_a_data_dependent_branch_is_refused_with_its_line(cache: Path) -> None:
    """The error names the file, the line and a way out."""
    named = r"test_refused_forwards\.py.*y\.sum\(\) > 0.*limit_memory\(model\.part, budget\)"
    with pytest.raises(CaptureError, match=named):
        pair(Branch(), cache, torch.randn(2, 3))


def test_python_randomness_is_refused(cache: Path) -> None:
    """A captured graph would repeat one draw for ever."""
    state = random.getstate()
    with pytest.raises(CaptureError, match="random module"):
        pair(Draws(), cache, torch.randn(2, 3))
    assert random.getstate() == state


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_another_thread_are_no_draws_of_the_forward(
    draw: Callable[[], float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sends logs, and draws how long it waits, while the first of two captures runs."""
    captures: list[Any] = []

    def disturbed(*arguments: Any, **options: Any) -> Any:
        captures.append(export_joint(*arguments, **options))
        if len(captures) == 1:
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        return captures[-1]

    monkeypatch.setattr("remat_executor.capture.joint_graph.export_joint", disturbed)
    generators = random.getstate(), np.random.get_state()
    pair(nn.Linear(3, 3), cache, torch.randn(2, 3))
    assert len(captures) == 2
    after = random.getstate(), np.random.get_state()
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    draw()  # what the thread drew stays drawn
    assert random.getstate() == after[0]
    assert all(map(np.array_equal, np.random.get_state(), after[1]))


@pytest.fixture
def busy_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread draws from Python's generator in each capture."""

    def disturbed(*arguments: Any, **options: Any) -> Any:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return export_joint(*arguments, **options)

    monkeypatch.setattr("remat_executor.capture.joint_graph.export_joint", disturbed)


@pytest.mark.usefixtures("busy_thread")
def test_a_thread_that_draws_all_the_time_is_told_from_the_forward(cache: Path) -> None:
    """As one does whose server cannot be reached."""
    profiled = sys.getprofile()
    original, planned = pair(nn.Linear(3, 3), cache, torch.randn(2, 3))
    assert sys.getprofile() is profiled
    assert_same_step(original, planned, torch.randn(2, 3))


class DrawsBackward(torch.autograd.Function):
    """Draws for a gradient, by a function that was imported by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * drawn()


drawn = random.random


@pytest.mark.usefixtures("busy_thread")
@pytest.mark.parametrize("draw", [random.random, lambda: random.choice([1, 2]), lambda: random.gauss(0, 1)])
def test_a_forward_that_draws_beside_such_a_thread_is_refused(draw: Callable[[], float], cache: Path) -> None:
    """Whichever function of the generator it calls, and in a backward too."""

    class Mixed(nn.Module):
        def __init__(self, backward: bool) -> None:
            super().__init__()
            self.linear, self.backward = nn.Linear(3, 3), backward

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return DrawsBackward.apply(y) if self.backward else y * draw()

    for backward in (False, True):
        with pytest.raises(CaptureError, match="draws from Python's random module"):
            pair(Mixed(backward), cache, torch.randn(2, 3))


class Assigns(nn.Module):
    """Puts a new tensor in a buffer's place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Remembers(nn.Module):
    """Keeps its last hidden tensor, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hidden: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.linear(x)
        self.seen.append(self.hidden)
        return self.hidden.tanh()


class Counts(Remembers):
    """Counts its calls, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, [1]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        return self.linear(x) * self.calls * len(self.sizes)


def test_assigning_a_buffer_is_refused(cache: Path) -> None:
    """The graph would compute the new buffer and lose it; the error says how to write it."""
    with pytest.raises(CaptureError, match=r"'mean'.*copy_"):
        pair(Assigns(), cache, torch.randn(2, 3))


def test_state_of_the_forward_is_refused(cache: Path) -> None:
    """A count would stand still in a graph."""
    model = Counts()
    with pytest.raises(CaptureError, match=r"changes calls, sizes.*buffer"):
        pair(model, cache, torch.randn(2, 3))
    assert (0, [1]) == (model.calls, model.sizes)


def test_what_the_forward_keeps_is_put_back_and_said(cache: Path) -> None:
    """No tracer stays behind in the user's module."""
    model = Remembers()
    with pytest.warns(RematWarning, match="hidden"):
        _, planned = pair(model, cache, torch.randn(2, 3))
    assert (None, []) == (model.hidden, model.seen)
    planned(torch.randn(2, 3)).sum().backward()
    assert planned.runs == {"planned": 1}


class Config:
    """What a model reads its settings from."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.kind: str | None = None


class FillsIn(nn.Module):
    """Fills a default into its config at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(3, 3), Config()

    def forward(self, x: Tensor) -> Tensor:
        self.config.kind = self.config.kind or "regression"
        return self.linear(x) if self.config.kind == "regression" else x


def test_a_default_that_the_forward_fills_in(cache: Path) -> None:
    """It is filled in as by the original's first call, and one plan serves."""
    x = torch.randn(2, 3)
    original, planned = pair(FillsIn(), cache, x)
    assert original.config.kind is None
    assert_same_step(original, planned, x)
    assert planned.config.kind == original.config.kind
    assert planned.config.kind is not None
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 2}
