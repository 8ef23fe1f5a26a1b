"""Read and restore the contents of objects that a module holds in addition to tensors and submodules.

Contents are the items of containers, the fields of objects (dict or slots), the cells of closures, and the
values of arrays and random generators. Infrastructure around a model, such as loggers, locks, queues,
optimizers and data loaders, is compared by identity only. No method of a user's class is called, except by a
descriptor behind a slot; an object that cannot be read is skipped.
"""

import array
import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from remat_executor.inspection.reads import EVERYTHING, Reads

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types that are compared by value."""

DEEPEST = 4
"""Levels that are read below an attribute."""

MOST = 5_000
"""Entries that are read in all; later ones are compared by identity and length."""

_MOST_NBYTES = 1 << 20  # of an array or the like
_INFRASTRUCTURE = {
    *("torch.optim", "torch.utils.data", "torch.utils.tensorboard", "torch.distributed", "torch.jit"),
    *("torch.amp", "torch.library", "torch._library", "torch._ops"),
    *("logging", "threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
    *("weakref", "_weakref", "io", "_io", "socket", "subprocess", "unittest.mock"),
}


@attrs.frozen(eq=False)
class Contents:
    """What is inside an object."""

    kind: str  # "items" of a container, "fields" of an object, or "numbers" of an array or generator
    parts: tuple[tuple[Any, Any], ...]  # (name, content)
    restore: Callable[[], None]  # puts these parts back


class TraversalLimit:
    """Limits what is read, and records what was read.

    Attributes:
        reads: which fields of objects are read.
        left: entries that may still be read.
        seen: by the ids of the objects met so far, the most levels at which they were read.
        exhausted: whether a container was not read because of the limit.
        found: the objects that were read, with their contents.
        counted: containers of which only the length was read.
    """

    def __init__(self, reads: Reads = EVERYTHING) -> None:
        self.reads = reads
        self.left = MOST
        self.seen: dict[int, int] = {}
        self.exhausted = False
        self.found: list[tuple[Any, Contents]] = []
        self.counted: list[Any] = []

    def enter(self, thing: Any, levels: int) -> bool:
        """Whether an object is to be read: for the first time, or deeper than before."""
        if self.seen.get(id(thing), -1) >= levels:
            return False
        self.seen[id(thing)] = levels
        return True


def contents_of(thing: Any, limit: TraversalLimit) -> Contents | None:
    """Read an object; None if it is infrastructure, plain or beyond the limit."""
    kind = type(thing)
    if issubclass(kind, (Tensor, nn.Module, type, types.ModuleType, *PLAIN)) or _is_infrastructure(kind):
        return None
    try:
        sized = issubclass(kind, (dict, list, tuple, set, frozenset, deque))
        if (len(thing) if sized else 0) > limit.left:
            limit.exhausted = True
            return None
        found = _read(thing, kind)
    except Exception:  # noqa: BLE001 - whatever a user's class raises when it is read
        return None
    if found is not None:
        if kind in limit.reads.kinds:
            parts = tuple(part for part in found.parts if limit.reads.include(kind, part[0]))
            found = attrs.evolve(found, parts=parts)
        limit.left -= len(found.parts)
        limit.found.append((thing, found))
    return found


def _is_infrastructure(kind: type) -> bool:
    for base in kind.__mro__:
        name = base.__module__
        while name:  # called often: set look-ups are faster than comparing prefixes
            if name in _INFRASTRUCTURE:
                return True
            name = name.rpartition(".")[0]
    return False


def _read(thing: Any, kind: type) -> Contents | None:
    if issubclass(kind, dict):
        if "__builtins__" in thing:  # a module's globals
            return None
        items = dict(thing)
        return Contents("items", tuple(items.items()), lambda: _refill(thing, items))
    if issubclass(kind, (list, deque)):
        copied = list(thing)
        return Contents("items", tuple(enumerate(copied)), lambda: _refill(thing, copied))
    if issubclass(kind, tuple):
        return Contents("items", tuple(enumerate(thing)), _keep)
    if issubclass(kind, (set, frozenset)):
        members = set(thing)
        return Contents("items", tuple((m, None) for m in members), lambda: _refill(thing, members))
    if issubclass(kind, types.FunctionType):
        cells = [cell for cell in thing.__closure__ or () if cell != types.CellType()]
        held = [cell.cell_contents for cell in cells]
        return Contents("fields", tuple(enumerate(held)), lambda: _set_cells(cells, held)) if held else None
    if issubclass(kind, functools.partial):
        return Contents("fields", (("func", thing.func), ("args", thing.args), ("kw", thing.keywords)), _keep)
    numbers = _numbers(thing, kind)
    if numbers is not None:
        return numbers
    return _fields(thing, kind)


def _keep() -> None:
    """Nothing to put back."""


def _numbers(thing: Any, kind: type) -> Contents | None:
    """Arrays, mutable byte strings and generators: one part, as bytes or a tuple."""
    if issubclass(kind, np.ndarray) and thing.dtype != object:
        if thing.nbytes > _MOST_NBYTES:
            return None
        copied = np.array(thing, copy=True)
        parts = (("", (str(copied.dtype), copied.shape, copied.tobytes())),)
        return Contents("numbers", parts, lambda: np.copyto(thing, copied))
    if issubclass(kind, np.ndarray):
        entries = thing.copy()
        return Contents("items", tuple(enumerate(entries.flat)), lambda: np.copyto(thing, entries))
    if issubclass(kind, np.generic):
        return Contents("numbers", (("", (str(thing.dtype), thing.tobytes())),), _keep)
    if issubclass(kind, bytearray | array.array):
        if len(thing) > _MOST_NBYTES:
            return None
        taken = thing[:]
        content = bytes(memoryview(thing).cast("B"))
        return Contents("numbers", (("", content),), lambda: thing.__setitem__(slice(None), taken))
    if issubclass(kind, random.Random) and kind is not random.SystemRandom:
        state = thing.getstate()
        return Contents("numbers", (("", state),), lambda: thing.setstate(state))
    if issubclass(kind, np.random.Generator):
        inner = thing.bit_generator.state
        return Contents("numbers", (("", repr(inner)),), lambda: setattr(thing.bit_generator, "state", inner))
    if issubclass(kind, np.random.RandomState):
        legacy = thing.get_state()
        return Contents("numbers", (("", repr(legacy)),), lambda: thing.set_state(legacy))
    return None


def _fields(thing: Any, kind: type) -> Contents | None:
    slots = [name for base in kind.__mro__ for name in slots_of(base)]
    held = []
    for name in slots:
        try:
            held.append((name, object.__getattribute__(thing, name)))
        except AttributeError:
            continue
    try:
        fields = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        fields = None
    if not isinstance(fields, dict):
        if not slots:
            return None
        return Contents("fields", tuple(held), lambda: _set_slots(thing, slots, held))
    copied = dict(fields)

    def restore() -> None:
        _refill(fields, copied)
        _set_slots(thing, slots, held)

    return Contents("fields", (*held, *copied.items()), restore)


def slots_of(kind: type) -> list[str]:
    """The names of a class's own slots that hold values."""
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    mangled = f"_{kind.__name__.lstrip('_')}"
    private = [n.startswith("__") and not n.endswith("__") for n in names]
    named = [mangled + n if hidden else n for n, hidden in zip(names, private, strict=True)]
    return [n for n in named if n not in ("__dict__", "__weakref__")]


def _refill(thing: Any, content: Any) -> None:
    """Restore a container's content, unless it is still the same."""
    same = len(thing) == len(content) and all(a is b for a, b in zip(thing, content, strict=True))
    if isinstance(content, dict):
        same = same and all(thing[key] is content[key] for key in content)
    if same or isinstance(thing, frozenset):
        return
    thing.clear()
    if isinstance(content, dict | set):
        thing.update(content)
    else:
        thing.extend(content)


def _set_cells(cells: list[Any], held: list[Any]) -> None:
    for cell, value in zip(cells, held, strict=True):
        cell.cell_contents = value


def _set_slots(thing: Any, slots: list[str], held: list[tuple[str, Any]]) -> None:
    before = dict(held)
    for name in slots:
        try:
            if name in before and object.__getattribute__(thing, name) is before[name]:
                continue
            if name in before:
                object.__setattr__(thing, name, before[name])
            else:
                object.__delattr__(thing, name)
        except AttributeError:
            continue


class Identity:
    """Compares an object by identity; equal to nothing once the object is gone: ids are reused."""

    __slots__ = ("_hash", "_thing")

    def __init__(self, thing: object) -> None:
        self._hash = id(thing)
        try:
            self._thing: Callable[[], object] = weakref.ref(thing)
        except TypeError:  # no weak references, so the object is kept alive
            self._thing = lambda: thing

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return False
        mine = self._thing()
        return self is other or (mine is not None and mine is other._thing())

    def __hash__(self) -> int:
        return self._hash
