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
from tests.helpers.planners import repeat_at_random

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
    with pytest.warns(RematWarning, match="external state .* changed"):
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
    with pytest.warns(RematWarning, match=r"external state \(TABLE.scale: 2.0 -> 5.0\)"):
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


class Parent(nn.Module):
    """A layer whose forward others build on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * SCALE


class Child(Parent):
    """Goes on from its parent's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Features(nn.Module):
    """Called by a method that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def features(self, x: Tensor) -> Tensor:
        """What its owner calls."""
        return self.layer(x) * SCALE


class Owner(nn.Module):
    """Calls a method of its submodule, and what it holds in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = Features(), how
        self.functions, self.strategy, self.options = [helped], Strategy(), SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "a method of a submodule":
                return self.net.features(x)
            case "a function in a list":
                return self.functions[0](self.net.layer(x))
            case "a function in a global":
                return FUNCTIONS["helped"](self.net.layer(x))
            case "an object that is called":
                return self.strategy(self.net.layer(x))
            case "a class of an object":
                return self.net.layer(x) * self.strategy.scale
            case "a class in a namespace":
                return self.net.layer(x) * SPACE.Shared.scale
        return self.net.layer(x)


class Strategy:
    """A function with a class."""

    scale = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * SCALE


FUNCTIONS = {"helped": helped}
SPACE = SimpleNamespace(Shared=Shared)
WAYS = (
    "a method of a submodule",
    "a function in a list",
    "a function in a global",
    "an object that is called",
    "a class of an object",
    "a class in a namespace",
)
MODULES: dict[str, Callable[[], nn.Module]] = {"its parent": Child} | {
    how: (lambda how=how: Owner(how)) for how in WAYS
}


@pytest.mark.parametrize("what", MODULES)
def test_what_is_reached_in_other_ways_is_guarded(what: str, tmp_path: Path) -> None:
    """Through classes, submodules, containers and objects."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    planned = PlannedModule(MODULES[what](), (x,), {}, repeat_at_random(2), cache_dir=tmp_path)
    before = planned(x).detach()
    doubled()
    Strategy.scale = 4.0
    try:
        with pytest.warns(RematWarning, match="external state .* changed"):
            found = planned(x).detach()
        assert torch.equal(planned.module(x), found)
    finally:
        Strategy.scale = 2.0
    assert not torch.equal(before, found)


def test_functions_and_methods_that_are_replaced_are_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that bring faster ones."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    planned = PlannedModule(Parent(), (x,), {}, repeat_at_random(2), cache_dir=tmp_path)
    monkeypatch.setattr(Parent, "forward", lambda self, x: self.layer(x) * 7)
    with pytest.warns(RematWarning, match=r"external state \(.*Parent.forward.*\) changed"):
        assert torch.equal(planned.module.layer(x) * 7, planned(x))
    other = PlannedModule(
        Reader(READS["a global of a function that is called"]), (x,), {}, repeat_at_random(2)
    )
    monkeypatch.setitem(globals(), "helped", lambda x: x * 11)
    with pytest.warns(RematWarning, match=r"external state \(.*helped.*\) changed"):
        assert torch.equal(other.module.layer(x) * 11, other(x))


class Trainer:
    """Keeps what its forward reads."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        self.op, self.factor, self.step_count = op, 2.0, 0

    def forward(self, x: Tensor) -> Tensor:
        """Assigned to a planned module."""
        return self.op(x) * self.factor * SCALE


@pytest.mark.filterwarnings("ignore:.*(factor|SCALE|forward).* changed:remat_executor.RematWarning")
def test_what_an_assigned_forward_reads_is_guarded(tmp_path: Path) -> None:
    """Fields of its object that it names, its globals and its defaults; other fields are not looked at."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    planned = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(2), cache_dir=tmp_path)
    trainer, before = Trainer(planned.forward), planned.forward
    planned.forward = trainer.forward
    with pytest.warns(RematWarning, match="planning again"):
        assert torch.equal(planned.module(x) * 2.0 * 2.0, planned(x).detach())
    trainer.step_count += 1
    assert torch.equal(planned.module(x) * 2.0 * 2.0, planned(x).detach())
    assert planned.runs["replanned"] == 1
    trainer.factor = 3.0
    assert torch.equal(planned.module(x) * 3.0 * 2.0, planned(x).detach())
    doubled()
    assert torch.equal(planned.module(x) * 3.0 * 4.0, planned(x).detach())
    assert planned.runs["replanned"] == 3
    for factor in (2.0, 3.0):

        def with_default(x: Tensor, factor: float = factor) -> Tensor:
            return before(x) * factor

        planned.forward = with_default
        assert torch.equal(planned.module(x) * factor, planned(x).detach())
