"""A quick look at a module notices all that a thorough one would, and nothing else."""

import copy
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.guards.signature import Signature
from remat_executor.guards.snapshot import Snapshot
from tests.helpers.planners import save_all


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Config:
    """Settings that compare by content."""

    deep: dict[str, Any]
    flags: set[str]
    width: int

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return 0


class Other(nn.Linear):
    """Another class with the same fields."""


def closure(held: list[int]) -> Callable[[], list[int]]:
    """A function that holds a list."""
    return lambda: held


class Model(nn.Module):
    """Things of every kind, some deep in others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.config = Config(width=3, deep={"rates": [0.1, 0.2]}, flags={"a", "b"})
        self.options = {"mode": "fast", 1: "number"}
        self.history: deque[int] = deque([1, 2])
        self.numbers = np.arange(4)
        self.slotted = Slotted(1)
        self.function = closure([1])
        self.table = torch.ones(1)
        self.tables = [torch.ones(2), torch.zeros(2)]
        self.one: object = 1
        self.last: object = "x"

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def replaced_config(model: Model) -> None:
    """An equal object in another's place: what is changed in it later must be seen."""
    model.config = copy.deepcopy(model.config)


def renamed(model: Model) -> None:
    """The last attribute under another name, in the same place of the dict."""
    value = model.__dict__.pop("last")
    model.__dict__["newest"] = value


def hooked(model: Model) -> None:
    model.layers[0].register_forward_hook(lambda *_: None)


def hooks_replaced(model: Model) -> None:
    model.layers[0].__dict__["_forward_hooks"] = {0: print}


def new_storage(model: Model) -> None:
    model.layers[0].weight.data = model.layers[2].weight.data


def transposed(model: Model) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.t()


def reshaped(model: Model) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.view(9)


def class_changed(model: Model) -> None:
    model.layers[0].__class__ = Other


def closure_changed(model: Model) -> None:
    assert isinstance(model.function, types.FunctionType)
    assert model.function.__closure__ is not None
    model.function.__closure__[0].cell_contents = [1]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an equal config": replaced_config,
    "a config's field": lambda m: setattr(m.config, "width", 4),
    "a field more": lambda m: setattr(m.config, "height", 4),
    "a number deep in a config": lambda m: m.config.deep["rates"].append(0.3),
    "a set in a config": lambda m: m.config.flags.add("c"),
    "an item of a dict": lambda m: m.options.update(mode="slow"),
    "an item under a number": lambda m: m.options.update({1: "other"}),
    "a deque": lambda m: m.history.append(3),
    "an array": lambda m: m.numbers.__setitem__(0, 7),
    "a slot": lambda m: setattr(m.slotted, "value", 2),
    "a closure": closure_changed,
    "True for 1": lambda m: setattr(m, "one", True),
    "a new attribute": lambda m: setattr(m, "more", 1),
    "a lost attribute": lambda m: delattr(m, "last"),
    "a renamed attribute": renamed,
    "an equal tensor": lambda m: setattr(m, "table", torch.ones(1)),
    "an equal tensor in a list": lambda m: m.tables.__setitem__(0, torch.ones(2)),
    "eval": lambda m: m.eval(),
    "eval of one": lambda m: m.layers[1].eval(),
    "frozen": lambda m: m.layers[0].weight.requires_grad_(False),
    "half": lambda m: m.layers[0].half(),
    "another storage": new_storage,
    "other strides": transposed,
    "another shape": reshaped,
    "a new parameter": lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.ones(3, 3))),
    "no bias": lambda m: setattr(m.layers[0], "bias", None),
    "a new buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "a new layer": lambda m: m.layers.append(nn.ReLU()),
    "another layer": lambda m: m.layers.__setitem__(0, nn.Linear(3, 3)),
    "another class": class_changed,
    "a hook": hooked,
    "hooks replaced": hooks_replaced,
    "all attributes of a layer": lambda m: setattr(m.layers[0], "__dict__", dict(m.layers[0].__dict__)),
    "all fields of a config": lambda m: setattr(m.config, "__dict__", dict(m.config.__dict__)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    """Each alone, wherever it is."""
    model = Model()
    snapshot = Snapshot.take(model)
    assert snapshot.is_current()
    CHANGES[change](model)
    assert not snapshot.is_current()
    assert Snapshot.take(model).is_current()


def test_training_changes_nothing() -> None:
    """Steps write parameters, gradients and statistics: no reason to read the module again."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    snapshot = Snapshot.take(model)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert snapshot.is_current()


def test_a_write_is_noticed_however_often_it_has_run() -> None:
    """Python runs code that has run often by faster instructions, which write into dicts themselves."""
    model = Model()
    for i in range(200):
        snapshot = Snapshot.take(model)
        assert snapshot.is_current()
        assert snapshot.is_current()
        if i % 2:
            model.number = i
        else:
            model.__dict__["number"] = i
        assert not snapshot.is_current()


def test_another_order_is_noticed() -> None:
    """An `OrderedDict` can take another order without a write."""
    model = Model()
    model.ordered = OrderedDict(a=1, b=2)
    snapshot = Snapshot.take(model)
    assert snapshot.is_current()
    assert snapshot.is_current()
    model.ordered.move_to_end("a")
    assert not snapshot.is_current()


def test_a_write_of_the_same_changes_nothing() -> None:
    """A module is not read again because an attribute was set to what it was."""
    model = Model()
    snapshot = Snapshot.take(model)
    assert snapshot.is_current()
    model.training = model.training
    model.layers[0].weight = model.layers[0].weight
    assert snapshot.is_current()
    model.layers[0].weight = nn.Parameter(torch.ones(3, 3))
    assert not snapshot.is_current()


def test_a_config_in_the_place_of_an_equal_one_is_watched() -> None:
    """A snapshot taken after the exchange sees what changes in the new one."""
    model = Model()
    first = Snapshot.take(model)
    replaced_config(model)
    second = Snapshot.take(model)
    assert first.own.attributes == second.own.attributes
    model.config.width = 5
    assert not second.is_current()
    assert Snapshot.take(model).own.attributes != second.own.attributes


def test_a_call_computes_its_signature_once(tmp_path: Path) -> None:
    """On the path of every planned call there is one signature and no new snapshot."""
    x = torch.randn(2, 3)
    planned = PlannedModule(nn.Linear(3, 3), (x,), {}, save_all, cache_dir=tmp_path)
    planned(x)
    signatures: list[Signature] = []

    class Counting(Snapshot):
        """A snapshot that counts the signatures that are made with it."""

        def signature(self, *args: Any) -> Signature:
            signatures.append(super().signature(*args))
            return signatures[-1]

    manager = planned._remat
    fields = {field.name: getattr(manager.snapshot, field.name) for field in attrs.fields(Snapshot)}
    manager.snapshot = counting = Counting(**fields)
    for calls in range(1, 4):
        planned(x)
        assert len(signatures) == calls
        assert manager.snapshot is counting
    assert planned.runs == {"planned": 4}
