"""An attribute that a forward does not read never replans; one that it reads, however, always does."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.inspection.read_recorder import ReadRecorder
from tests.helpers.planners import save_all

pytestmark = pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")


class Config:
    """Settings, each read in a way of its own."""

    def __init__(self) -> None:
        self.by_field = self.by_helper = self.by_match = self.idle = 2.0


class Plain:
    """A base without a look-up of its own."""


class Mapped(Plain):
    """Maps one name to another, as configs of transformers do."""

    def __init__(self) -> None:
        self.inner, self.spare = 2.0, 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("inner" if name == "outer" else name)


class MappedAlone:
    """The same without a base that could be observed."""

    def __init__(self) -> None:
        self.inner_alone, self.spare = 2.0, 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(f"inner_{name}" if name == "alone" else name)


class Bypassing:
    """Looks its attributes up itself."""

    def __init__(self) -> None:
        self.hidden, self.spare = 2.0, 2.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "hidden" if name == "shown" else name)


class Slotted:
    """Without a dict."""

    __slots__ = ("spare", "value")

    def __init__(self) -> None:
        self.value = self.spare = 2.0


@dataclass
class Whole:
    """Read as a whole."""

    value: float = 2.0
    spare: float = 2.0


@dataclass
class Other(Whole):
    """The same, of which one field is read."""

    more: list[float] = field(default_factory=list)


class Scaled(torch.autograd.Function):
    """Reads in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.module.in_backward, None


def helper(config: Any) -> float:
    """A function that a forward calls."""
    found: float = config.by_helper
    return found


def matched(config: Any) -> float:
    """A pattern that reads."""
    match config:
        case Config(by_match=value):
            return float(value)
    return 0.0


class Base(nn.Module):
    """What the model's class derives from."""

    by_class = 2.0

    def scale_of_base(self) -> Any:
        """Read by `super`."""
        return self.by_super

    @property
    def by_property(self) -> Any:
        """Read by a property."""
        return self.behind_property


class Model(Base):
    """Attributes that are read in as many ways."""

    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        self.layer, self.dropout, self.ways = nn.Linear(3, 3), nn.Dropout(0.25), ways
        self.direct = self.constant = self.computed = self.by_super = self.behind_property = 2.0
        self.by_getter = self.nested = self.in_list = self.in_backward = self.idle = self._hidden = 2.0
        self.extra = {"by_getattr": 2.0}
        self.mapped_alone = MappedAlone()
        self.config, self.mapped, self.bypassing, self.slotted = Config(), Mapped(), Bypassing(), Slotted()
        self.whole, self.other, self.copied, self.pickled = Whole(), Other(), Whole(), Whole()
        self.space = SimpleNamespace(value=2.0, spare=2.0)

    def __getattr__(self, name: str) -> Any:
        if name == "by_getattr":
            return self.extra[name]
        return super().__getattr__(name)

    def scale_of_base(self) -> Any:
        return super().scale_of_base()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for way in self.ways:
            y = WAYS[way][0](self, y)
        return y.square().sum()


class Variable(nn.Module):
    """Reads all of its attributes, by `vars`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_vars = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(value for name, value in sorted(vars(self).items()) if name.startswith("in_"))


def _by_function(m: Any, y: Tensor) -> Tensor:
    def inner() -> Any:
        return m.nested

    return y * inner()


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "directly": (lambda m, y: y * m.direct, "direct"),
    "by a constant name": (lambda m, y: y * getattr(m, "constant"), "constant"),  # noqa: B009
    "by a computed name": (
        lambda m, y: y * getattr(m, "-".join(["comp", "uted"]).replace("-", "")),
        "computed",
    ),
    "by a getter": (lambda m, y: y * operator.attrgetter("by_getter")(m), "by_getter"),
    "by super": (lambda m, y: y * m.scale_of_base(), "by_super"),
    "by a property": (lambda m, y: y * m.by_property, "behind_property"),
    "by __getattr__": (lambda m, y: y * m.by_getattr, "extra.by_getattr"),
    "in a nested function": (_by_function, "nested"),
    "in a list": (lambda m, y: y * sum([m.in_list for _ in range(2)]), "in_list"),
    "instead of its class": (lambda m, y: y * m.by_class, "by_class"),
    "if there": (lambda m, y: y * 3 if hasattr(m, "added") else y, "added"),
    "in a backward": (lambda m, y: Scaled.apply(y, m), "in_backward"),
    "in a submodule": (lambda m, y: m.dropout(y), "dropout.p"),
    "in a config": (lambda m, y: y * m.config.by_field, "config.by_field"),
    "in a helper": (lambda m, y: y * helper(m.config), "config.by_helper"),
    "in a pattern": (lambda m, y: y * matched(m.config), "config.by_match"),
    "under another name": (lambda m, y: y * m.mapped.outer, "mapped.inner"),
    "under a computed name": (lambda m, y: y * m.mapped_alone.alone, "mapped_alone.inner_alone"),
    "by its own look-up": (lambda m, y: y * m.bypassing.shown, "bypassing.hidden"),
    "in a slot": (lambda m, y: y * m.slotted.value, "slotted.value"),
    "in a namespace": (lambda m, y: y * m.space.value, "space.value"),
    "in a dataclass": (lambda m, y: y * m.other.value, "other.value"),
    "as a dict": (lambda m, y: y * asdict(m.whole)["value"], "whole.value"),
    "in a copy": (lambda m, y: y * copy.copy(m.copied).value, "copied.value"),
    "in a pickle": (lambda m, y: y * pickle.loads(pickle.dumps(m.pickled)).value, "pickled.value"),
}
IDLE = ["idle", "config.idle", "_hidden", "new_mark"]


def change(module: Any, path: str, value: Any = 0.5) -> None:
    """Set an attribute, a field of an object or an item of a dict."""
    owner, _, name = path.rpartition(".")
    holder = operator.attrgetter(owner)(module) if owner else module
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def assert_same(original: nn.Module, planned: nn.Module, x: Tensor) -> None:
    """Losses and gradients, bit by bit."""
    found = []
    for module in (original, planned):
        torch.manual_seed(3)
        module.zero_grad()
        module(x).backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        torch.manual_seed(3)
        found[-1].append(module(x).detach())
    assert all(map(torch.equal, *found))


def pair(ways: list[str], cache: Path) -> tuple[nn.Module, PlannedModule, Tensor]:
    torch.manual_seed(0)
    model, x = Model(ways), torch.randn(2, 3)
    original = copy.deepcopy(model)
    return original, PlannedModule(model, (x,), {}, save_all, cache_dir=cache), x


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_in_any_way_replans(way: str, cache: Path) -> None:
    """And what nothing reads does not: the plan that was made stays."""
    original, planned, x = pair([way], cache)
    for path in IDLE:
        for module in (original, planned):
            change(module, path)
    assert_same(original, planned, x)
    assert planned.runs == {"planned": 2}
    for module in (original, planned):
        change(module, WAYS[way][1])
    assert_same(original, planned, x)
    assert planned.runs == {"planned": 4, "replanned": 1}


PATHS = sorted({path for _, path in WAYS.values()} | set(IDLE))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ways=st.lists(st.sampled_from(sorted(WAYS)), max_size=4, unique=True),
    changes=st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from([0.5, 2.0, 3, True])), max_size=4),
)
def test_planned_and_unplanned_are_equal_after_any_change(
    ways: list[str], changes: list[tuple[str, Any]], cache: Path
) -> None:
    """Random combinations: equal always, and planned again only for what is read."""
    original, planned, x = pair(ways, cache)
    read = {WAYS[way][1] for way in ways}
    for path, value in changes:
        value = value / 4 if path == "dropout.p" else value
        before = planned.runs["replanned"]
        for module in (original, planned):
            change(module, path, value)
        assert_same(original, planned, x)
        if path not in read and path.partition(".")[0] in ("config", "idle", "_hidden", "direct", "nested"):
            assert planned.runs["replanned"] == before


def test_all_is_read_by_vars(cache: Path) -> None:
    """Also what is added later."""
    x = torch.randn(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), Variable())
    planned = PlannedModule(model, (x,), {}, save_all, cache_dir=cache)
    model[1].in_addition = 1.0
    assert torch.equal(planned(x), planned.module(x))
    assert planned.runs["replanned"] == 1


def test_a_planned_module_that_reads_itself_is_guarded(cache: Path) -> None:
    """What an assigned forward reads of the planned module is an attribute of the original."""
    x = torch.randn(2, 3)
    planned: Any = PlannedModule(nn.Linear(3, 3), (x,), {}, save_all, cache_dir=cache)
    planned.factor, before = 2.0, planned.forward
    planned.forward = lambda x: before(x) * sum(v for k, v in vars(planned).items() if k.startswith("factor"))
    for factor in (2.0, 3.0):
        planned.factor = factor
        assert torch.equal(planned(x), planned.module(x) * factor)
    planned.factor_more = 4.0
    assert torch.equal(planned(x), planned.module(x) * 7.0)


def test_each_branch_has_its_own_reads(cache: Path) -> None:
    """Going back to a branch finds its plan, with what the other one read changed meanwhile."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.high, self.low = nn.Linear(3, 3), 2.0, 3.0

        def forward(self, x: Tensor, high: bool) -> Tensor:
            return self.layer(x) * (self.high if high else self.low)

    x = torch.randn(2, 3)
    planned = PlannedModule(Branching(), (x, True), {}, save_all, cache_dir=cache)
    for high, changed in ((False, "low"), (True, "low"), (True, "low"), (False, "high"), (False, "low")):
        assert torch.equal(planned(x, high), planned.module(x, high))
        setattr(planned, changed, getattr(planned, changed) + 1)
    assert planned.runs == {"planned": 5, "replanned": 2}


def test_a_counter_does_not_make_a_call_read_the_module(cache: Path) -> None:
    """Its value is not looked at; a new attribute makes it read the module once, and plan nothing."""
    _, planned, x = pair(["directly", "in a config"], cache)
    manager: Any = planned._remat
    planned(x)
    snapshot = manager.snapshot
    for step in range(3):
        for path in ("idle", "config.idle"):
            change(planned, path, step)
        planned(x)
        assert manager.snapshot is snapshot
    planned.marked = True
    planned(x)
    assert manager.snapshot is not snapshot
    assert planned.runs == {"planned": 5}


def test_a_class_is_left_as_it_was(cache: Path) -> None:
    """After a capture, and after one that fails."""
    pair(list(WAYS), cache)
    broken, x = Model([]), torch.randn(2, 3)
    broken.layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        PlannedModule(broken, (x,), {}, save_all, cache_dir=cache)
    own = {
        kind for kind in (nn.Module, Model, Config, Plain, Mapped, Other) if "__getattribute__" in vars(kind)
    }
    assert own == {Mapped}
    assert vars(Mapped)["__getattribute__"].__module__ == __name__


def test_a_second_recorder_records_nothing() -> None:
    """While a thread records, others guard everything."""
    module, recorders = Model([]), [ReadRecorder(), ReadRecorder()]

    def record() -> None:
        with recorders[1].recording(module):
            assert module.direct == 2.0

    with recorders[0].recording(module):
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
    assert recorders[0].reads.kinds
    assert not recorders[1].reads.kinds


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute")
def test_a_compiled_function_makes_all_count_as_read(cache: Path) -> None:
    """It reads attributes without asking the class."""
    _, planned, x = pair(["directly"], cache)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model[1].compile(backend="eager")
    compiled = PlannedModule(model, (x,), {}, save_all, cache_dir=cache)
    assert compiled._remat.reads.kinds == frozenset()
    assert planned._remat.reads.kinds


def test_a_forward_in_the_dict_is_always_guarded(cache: Path) -> None:
    """Also where nothing looks it up during a capture."""
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def times(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x @ model.weight * factor

    model.__dict__["forward"] = times(2.0)
    planned = PlannedModule(model, (x,), {}, save_all, cache_dir=cache)
    model.__dict__["forward"] = times(3.0)
    assert torch.equal(planned(x), x @ model.weight * 3.0)
