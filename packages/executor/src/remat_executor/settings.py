"""What a module holds beside tensors and submodules, as a key that changes when a forward could notice.

Plain values count by value, functions by identity, containers and objects by what is in them: a config that
holds a dict of numbers, a strategy object and its class. The walk goes `DEEPEST` levels down and leaves out
what has more than `MOST` entries, which counts by identity and length: a module that refers to its trainer
must not make each call walk through a data set.
"""

from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remat_executor.tensors import REGISTRIES

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types that are compared by value."""

_SIMPLE = frozenset((type(None), bool, int, str))  # those among them that `==` tells apart within one type

DEEPEST = 3
MOST = 512
_MOST_NBYTES = 1 << 16  # of an array


class Itself:
    """Equal to itself alone; holds on to the object, whose id another one could have after it."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def exactly(value: Any) -> tuple[Any, ...]:
    """A key that tells apart what `==` does not: True from 1, 0.0 from -0.0; and a NaN equals itself."""
    if isinstance(value, float):
        return (type(value), value.hex())
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    return (type(value), value if isinstance(value, PLAIN) else Itself(value))


def settings(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """(attribute, key) of every plain attribute of these modules; hashable."""
    seen: set[int] = set()
    return tuple(
        (name, _key(value, DEEPEST, seen))
        for module in modules
        for name, value in module.__dict__.items()
        if name not in REGISTRIES and not isinstance(value, Tensor)
    )


def _key(value: Any, levels: int, seen: set[int]) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value)
    if kind is tuple and _SIMPLE.issuperset(kinds := tuple(map(type, value))):
        return (kinds, value)  # a stride, a padding: most of what modules hold
    if isinstance(value, PLAIN):
        return exactly(value)
    if isinstance(value, Tensor):
        return Tensor  # an input of the graph, guarded as such
    if isinstance(value, nn.Module | Enum | type):
        return Itself(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype != object):
        few = value.nbytes <= _MOST_NBYTES
        return (type(value), str(value.dtype), value.shape, value.tobytes() if few else Itself(value))
    entries = _entries(value)
    if entries is None:
        return Itself(value)
    if id(value) in seen:
        return type(value)  # its entries stand where it was met first
    seen.add(id(value))
    found = list(entries)
    if levels == 0 or len(found) > MOST:
        return (Itself(value), len(found))
    keys = ((_name(name), _key(inner, levels - 1, seen)) for name, inner in found)
    if isinstance(value, Set):
        return (type(value), frozenset(keys))
    return (Itself(value) if callable(value) else type(value), *keys)


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """(name, content) of what is inside; None if nobody can look inside."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Set):
        return ((item, None) for item in value)
    cells = getattr(value, "__closure__", None)
    if cells:
        return enumerate(cell.cell_contents for cell in cells if cell != type(cell)())
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    fields = getattr(value, "__dict__", None)
    if fields is None and not slots:
        return None
    held = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*held, *(fields.items() if isinstance(fields, dict) else ())]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (
        (slots,)
        if isinstance(slots, str)
        else tuple(s for s in slots if s not in ("__dict__", "__weakref__"))
    )


def _name(name: Any) -> Any:
    return name if isinstance(name, str) else exactly(name)
