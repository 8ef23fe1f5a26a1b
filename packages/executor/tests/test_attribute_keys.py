"""Every change of what a module holds that a forward could notice changes the key; nothing else does."""

from __future__ import annotations

import array
import enum
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from remat_executor.inspection.attribute_keys import attribute_keys
from remat_executor.inspection.object_contents import MOST


class Box:
    """An object with fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slotted:
    """An object without a dict."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


@attrs.define
class Doubles:
    """A strategy: what it does is its class."""

    factor: float = 2.0

    def __call__(self, x: float) -> float:
        return x * self.factor


class Triples(Doubles):
    """Another with the same fields."""


class Color(enum.Enum):
    """Two names."""

    RED = 1
    BLUE = 2


def _scaled_by(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number": (lambda: 1, lambda _: 2),
    "true_for_one": (lambda: 1, lambda _: True),
    "negative_zero": (lambda: 0.0, lambda _: -0.0),
    "tuple": (lambda: (1, 2.0), lambda _: (1, 3.0)),
    "bool_in_tuple": (lambda: (1, 2), lambda _: (True, 2)),
    "list_item": (lambda: [1, 2], lambda held: held.__setitem__(0, 5)),
    "nested_list": (lambda: [[1]], lambda held: held[0].append(2)),
    "nested_dict": (lambda: {"a": {"b": 1}}, lambda held: held["a"].update(b=2)),
    "key_type": (lambda: {1: 0}, lambda _: {True: 0}),
    "set": (lambda: {"a"}, lambda held: held.add("b")),
    "field": (lambda: Box(scale=1.0), lambda held: setattr(held, "scale", 2.0)),
    "field_of_field": (lambda: Box(inner=Box(k=1)), lambda held: setattr(held.inner, "k", 2)),
    "slot": (lambda: Slotted(1.0), lambda held: setattr(held, "factor", 2.0)),
    "class": (Doubles, lambda _: Triples()),
    "callable_field": (Doubles, lambda held: setattr(held, "factor", 4.0)),
    "function": (lambda: _scaled_by(2.0), lambda _: _scaled_by(2.0)),
    "enum": (lambda: Color.RED, lambda _: Color.BLUE),
    "array_item": (lambda: np.zeros(3), lambda held: held.__setitem__(0, 1.0)),
    "numpy_number": (lambda: np.float32(1), lambda _: np.float32(2)),
    "dtype": (lambda: torch.float32, lambda _: torch.float64),
    "many": (lambda: list(range(MOST + 1)), lambda held: held.append(0)),
    "hundreds": (lambda: list(range(600)), lambda held: held.__setitem__(300, 0)),
    "deque": (lambda: deque([1, 2]), lambda held: held.__setitem__(0, 5)),
    "hidden_slot": (lambda: Hidden(1.0), lambda held: held.set(2.0)),
    "bytearray": (lambda: bytearray(3), lambda held: held.__setitem__(0, 1)),
    "array": (lambda: array.array("d", [1.0]), lambda held: held.__setitem__(0, 2.0)),
    "array_of_objects": (lambda: np.array([1, "a"], object), lambda held: held.__setitem__(0, 2)),
    "large_array": (lambda: np.zeros(30_000), lambda held: held.__setitem__(0, 1.0)),
    "partial": (lambda: partial(print, sep=""), lambda held: held.keywords.update(sep=" ")),
    "four_deep": (lambda: {"a": {"b": {"c": 1}}}, lambda held: held["a"]["b"].update(c=2)),
}


class Hidden:
    """A slot whose name is mangled."""

    __slots__ = ("__factor",)

    def __init__(self, factor: float) -> None:
        self.set(factor)

    def set(self, factor: float) -> None:
        """Change it."""
        self.__factor = factor


class Answers:
    """Has an answer to every question about it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


class Refuses:
    """Has none."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not connected")


def _dead_proxy() -> Any:
    return weakref.proxy(Box())


@pytest.mark.parametrize("make", [Answers, Refuses, _dead_proxy, MagicMock, threading.Lock, globals])
def test_what_cannot_be_looked_into_counts_by_identity(make: Callable[[], Any]) -> None:
    """Whatever a class answers when it is looked at, nothing is raised and nothing changes."""
    module = nn.Module()
    held = make()
    module.__dict__["held"] = held
    before = attribute_keys([module])
    assert attribute_keys([module]) == before
    module.__dict__["held"] = Box()
    assert attribute_keys([module]) != before


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda _: logging.getLogger("some")])
def test_machinery_around_a_model_is_not_looked_into(make: Callable[[Any], Any]) -> None:
    """An optimizer that steps, a logger that remembers levels: no change of the model's attributes."""
    module = nn.Linear(2, 2)
    module.held = make(module.parameters())
    before = attribute_keys([module])
    module(torch.ones(1, 2)).sum().backward()
    if isinstance(module.held, torch.optim.Optimizer):
        module.held.step()
    else:
        module.held.isEnabledFor(logging.DEBUG)
    assert attribute_keys([module]) == before


def test_one_limit_for_all_that_is_held() -> None:
    """A million numbers in nested containers are not traversed at each call."""
    module = nn.Module()
    module.held = {i: {j: list(range(100)) for j in range(100)} for i in range(100)}
    key = attribute_keys([module])
    assert len(str(key)) < 100 * MOST


def test_what_is_gone_is_not_held() -> None:
    """A key of a call with a function does not keep the function; nor does it equal another's key."""

    def make() -> Callable[[int], int]:
        return lambda x: x

    act = make()
    module = nn.Module()
    module.act = act
    before, alive = attribute_keys([module]), weakref.ref(act)
    assert attribute_keys([module]) == before
    del act, module.act
    gc.collect()
    assert alive() is None
    module.act = make()
    assert attribute_keys([module]) != before


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    """In place or by replacing; and reading twice changes nothing."""
    make, change = CHANGES[name]
    module = nn.Module()
    module.held = make()
    before = attribute_keys([module])
    assert before == attribute_keys([module])
    assert hash(before) == hash(attribute_keys([module]))
    replaced = change(module.held)
    if replaced is not None:
        module.held = replaced
    assert attribute_keys([module]) != before


def test_a_closure_counts_by_what_it_holds() -> None:
    """One function object whose enclosed number changes."""

    def make() -> tuple[Callable[[], int], Callable[[int], None]]:
        factor = 1

        def read() -> int:
            return factor

        def write(value: int) -> None:
            nonlocal factor
            factor = value

        return read, write

    module = nn.Module()
    module.act, write = make()
    before = attribute_keys([module])
    write(2)
    assert attribute_keys([module]) != before


def test_equal_but_not_the_same() -> None:
    """Objects count by their class and fields: a copy of a config is no change."""
    module = nn.Module()
    module.config = Box(scale=1.0, names=["a"])
    before = attribute_keys([module])
    module.config = Box(scale=1.0, names=["a"])
    assert attribute_keys([module]) == before


def test_cycles_and_tensors() -> None:
    """An object that refers to itself ends the traversal; tensors are the graph's inputs."""
    module = nn.Module()
    module.box = Box(table=torch.zeros(2))
    module.box.me = module.box
    before = attribute_keys([module])
    module.box.table = torch.ones(2)
    assert attribute_keys([module]) == before
