"""What a forward reads beside its module and its arguments: guarded, or told."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, RematWarning
from tests.planners import repeat_at_random

SCALE = 2.0
TABLE = {"scale": 2.0}
SETTINGS = SimpleNamespace(scale=2.0)
SEEN: list[int] = []


class Shared:
    """Values that a class holds."""

    scale = 2.0


def helped(x: Tensor) -> Tensor:
    """A function that a forward calls."""
    return x * SCALE


def enclosed(box: dict[str, float]) -> Callable[[Tensor], Tensor]:
    """A function that reads what it was made with."""
    return lambda x: x * box["scale"]


BOX = {"scale": 2.0}
ENCLOSED = enclosed(BOX)

READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a global": lambda m, x: x * SCALE,
    "a global of a function that is called": lambda m, x: helped(x),
    "a container": lambda m, x: x * TABLE["scale"],
    "an object": lambda m, x: x * SETTINGS.scale,
    "an attribute of a class": lambda m, x: x * Shared.scale,
    "an attribute of its own class": lambda m, x: x * m.gain,
    "a method's global": lambda m, x: m.scaled(x),
    "a closure": lambda m, x: ENCLOSED(x),
}


def doubled() -> None:
    """Twice what it was, wherever it is."""
    globals()["SCALE"] *= 2
    for holder in (TABLE, BOX):
        holder["scale"] *= 2
    for thing, name in ((SETTINGS, "scale"), (Shared, "scale"), (Reader, "gain")):
        setattr(thing, name, 2 * getattr(thing, name))


class Reader(nn.Module):
    """A layer, and something read from elsewhere."""

    gain = 2.0

    def __init__(self, reads: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(8, 8), reads

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self, self.layer(x))

    def scaled(self, x: Tensor) -> Tensor:
        """A method that the forward calls."""
        return x * SCALE


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Put everything back."""
    yield
    TABLE["scale"] = BOX["scale"] = SETTINGS.scale = Shared.scale = Reader.gain = 2.0
    globals()["SCALE"] = 2.0


def plan(reads: Callable[[Any, Tensor], Tensor], cache: Path) -> tuple[PlannedModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return PlannedModule(Reader(reads), (x,), {}, repeat_at_random(2), cache_dir=cache), x


@pytest.mark.parametrize("what", READS)
def test_what_changes_outside_is_planned_anew(what: str, tmp_path: Path) -> None:
    """The number of the moment counts, as in eager; what does not change is planned once."""
    planned, x = plan(READS[what], tmp_path)
    for _ in range(2):
        assert torch.equal(planned.module(x), planned(x))
    assert planned.runs == {"planned": 2}
    doubled()
    with pytest.warns(RematWarning, match="surroundings .* changed"):
        found = planned(x)
    assert torch.equal(planned.module(x), found)
    assert planned.runs == {"planned": 3, "replanned": 1}


def reader_of(module: type[nn.Module]) -> Callable[[Any, Tensor], Tensor]:
    """Reads through a decorated function, whose own name hides it."""

    def decorated(m: Any, x: Tensor) -> Tensor:
        return x * TABLE["scale"]

    def wrapper(*args: Any) -> Tensor:
        return decorated(*args)

    return wrapper


def test_a_decorated_function_is_read(tmp_path: Path) -> None:
    """What it encloses is followed."""
    planned, x = plan(reader_of(Reader), tmp_path)
    TABLE["scale"] = 5.0
    with pytest.warns(RematWarning, match=r"surroundings \(TABLE\)"):
        assert torch.equal(planned.module(x), planned(x))


CLOCKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "time.perf_counter": lambda m, x: x + 0 * time.perf_counter(),
    "datetime.now": lambda m, x: x + 0 * datetime.datetime.now().second,
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_clock_is_told_once(clock: str, tmp_path: Path) -> None:
    """It stands still in a planned module."""
    with pytest.warns(RematWarning, match=f"reads the clock .{clock}.|planning again") as caught:
        plan(CLOCKS[clock], tmp_path)[0].eval()(torch.randn(4, 8))
    assert [True, False] == ["reads the clock" in str(each.message) for each in caught]


def _noted(m: Any, x: Tensor) -> Tensor:
    SEEN.append(1)
    return x


def test_a_global_that_the_forward_changes_is_told(tmp_path: Path) -> None:
    """The planned module does not change it."""
    with pytest.warns(RematWarning, match="the forward changes SEEN"):
        planned, x = plan(_noted, tmp_path)
    before = len(SEEN)
    planned(x)
    assert before == len(SEEN)
