"""State that a forward changes wherever it lies, in containers, closures, queues and hooks, is as it was."""

from __future__ import annotations

import collections
import copy
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat_executor import CaptureError, PlannedModule, RematWarning
from tests.helpers.planners import repeat_at_random
from tests.helpers.small_forward import Forward, Small, planned


def _accumulates(holder: Callable[[Small], Any]) -> Forward:
    def forward(m: Small, x: Tensor) -> Tensor:
        return m.middle(x).sum() * holder(m)

    return forward


def _raises_by_one(container: Any, key: Any) -> int:
    container[key] += 1
    return int(container[key])


@pytest.mark.parametrize(
    ("held", "count", "name"),
    [
        ({"_n": 0}, lambda m: _raises_by_one(m.__dict__, "_n"), "_n"),
        ({"d": {"n": 0}}, lambda m: _raises_by_one(m.d, "n"), r"d\['n'\]"),
        ({"d": [0]}, lambda m: _raises_by_one(m.d, 0), r"d\[0\]"),
        ({"d": {"a": {"n": 0}}}, lambda m: _raises_by_one(m.d["a"], "n"), r"d\['a'\]\['n'\]"),
        ({"d": {1}}, lambda m: m.d.add(len(m.d) + 1) or len(m.d), "d"),
        ({"d": collections.deque()}, lambda m: m.d.append(1) or len(m.d), "d"),
        ({"d": np.zeros(2)}, lambda m: _raises_by_one(m.d, 0), "d"),
        ({"d": bytearray(2)}, lambda m: _raises_by_one(m.d, 0), "d"),
    ],
)
def test_state_anywhere_is_refused_and_put_back(
    held: dict[str, Any], count: Callable[[Small], int], name: str, cache: Path
) -> None:
    """However deep it lies, and the user's module is as it was."""
    model = Small(_accumulates(count))
    model.__dict__.update(copy.deepcopy(held))
    with pytest.raises(CaptureError, match=f"the forward changes {name}.*buffer"):
        planned(model, cache, torch.randn(8, 16))
    assert repr({key: model.__dict__[key] for key in held}) == repr(held)


class Counter:
    """Counts its calls."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def _counting_closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


@pytest.mark.parametrize(
    "make",
    [Counter, _counting_closure, lambda: random.Random(3).random, lambda: np.random.default_rng(3).random],
)
def test_state_of_what_is_called_is_refused(make: Callable[[], Callable[[], float]], cache: Path) -> None:
    """A counter in slots, in a closure, in a generator of the module's own: put back as it was."""
    model = Small(_accumulates(lambda m: m.draw()))
    model.draw = make()
    model.owner = getattr(model.draw, "__self__", None)
    expected = copy.deepcopy(model.owner) if model.owner is not None else None
    with pytest.raises(CaptureError, match="the forward changes"):
        planned(model, cache, torch.randn(8, 16))
    if isinstance(expected, random.Random | np.random.Generator):
        assert model.draw() == expected.random()
    else:
        assert model.draw() == 1


def _lazy_buffer(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.ones(16))
    return m.middle(x).sum()


def _lazy_parameter(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "gain"):
        m.gain = nn.Parameter(torch.ones(16))
    return (m.middle(x) * m.gain).sum()


def _lazy_layer(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "third"):
        m.third = nn.Linear(16, 16)
    return m.third(m.middle(x)).sum()


@pytest.mark.parametrize("forward", [_lazy_buffer, _lazy_parameter, _lazy_layer])
def test_what_the_first_call_registers(forward: Forward, cache: Path) -> None:
    """Refused before that call, with the model as it was; planned after it."""
    model, x = Small(forward), torch.randn(8, 16)
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    with pytest.raises(CaptureError, match="call the model once before"):
        planned(model, cache, x)
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    expected = model(x)
    module = planned(model, cache, x)
    assert torch.equal(module(x), expected)
    assert module.runs == {"planned": 1}


def test_other_threads_may_seed_while_a_forward_is_captured(cache: Path) -> None:
    """The watch is over the thread that captures."""
    failures: list[Exception] = []

    def seeds() -> None:
        try:
            torch.manual_seed(1)
        except CaptureError as error:
            failures.append(error)

    def forward(m: Small, x: Tensor) -> Tensor:
        other = threading.Thread(target=seeds)
        other.start()
        other.join()
        return m.middle(x).sum()

    planned(Small(forward), cache, torch.randn(8, 16))
    assert not failures


def test_a_queue_that_a_module_refers_to_keeps_its_items(cache: Path) -> None:
    """Somebody else may fill it meanwhile: it is left alone."""

    def forward(m: Small, x: Tensor) -> Tensor:
        m.inbox.put(1)  # type: ignore[call-arg] # as another thread would
        return m.middle(x).sum()

    model = Small(forward)
    model.inbox = queue.Queue()
    planned(model, cache, torch.randn(8, 16))
    assert model.inbox.qsize() > 0


def test_hooks_that_the_forward_installs_are_taken_back(cache: Path) -> None:
    """Installed at the first call, as transformers does: neither they nor their mark stay after planning."""

    def forward(m: Small, x: Tensor) -> Tensor:
        if not getattr(m, "_installed", False):
            m.last.register_forward_hook(lambda module, args, output: output * 2)
            m._installed = True
        return m.middle(x).sum()

    model, x = Small(forward), torch.randn(8, 16)
    module = planned(model, cache, x)
    assert not model.last._forward_hooks
    assert not hasattr(model, "_installed")
    planned_loss = module(x)
    assert torch.equal(planned_loss, model(x))
    assert len(model.last._forward_hooks) == 1


def test_no_tensor_of_the_trace_stays_in_a_queue(cache: Path) -> None:
    """A deque of hidden tensors: put back, and said."""

    def forward(m: Small, x: Tensor) -> Tensor:
        hidden = m.first(x)
        m.queue.append(hidden.detach())
        return m.last(hidden).sum()

    model = Small(forward)
    model.queue = collections.deque(maxlen=3)
    with pytest.warns(RematWarning, match=r"sets queue.*; return it as an output") as caught:
        PlannedModule(model, (torch.randn(8, 16),), {}, repeat_at_random(12), cache_dir=cache)
    assert caught[0].filename == __file__
    assert not model.queue
