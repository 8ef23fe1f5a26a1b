"""What a forward can read beside its module and its arguments: globals, classes, closures, clocks.

A captured graph holds the numbers that were there. So what the code of a forward names is guarded, as the
module's own attributes are, and a reading of the clock, which no guard could follow, is told.

The code is read, not run: a name counts if a function mentions it, whether or not it gets there. Functions
and methods that it names are followed, but not into torch and the standard library, and no further than
`MOST` functions.

Imperfect: what is found by a computed name, in the environment, in a file or inside a compiled extension is
not seen.
"""

import datetime
import functools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
from torch import nn

from remat_executor.contents import Room
from remat_executor.settings import key_of

MOST = 300
"""Functions that are read for one module."""

_NOT_READ = frozenset({"torch", "numpy", "remat_executor", *sys.stdlib_module_names}) - {"__main__"}
_KINDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "localtime", "gmtime", "ctime")
_CLOCKS = frozenset(name for kind in _KINDS for name in (kind, f"{kind}_ns") if hasattr(time, name))
_DATES = frozenset({"now", "today", "utcnow"})


@attrs.frozen(eq=False)
class Place:
    """Where a forward can read something.

    Attributes:
        label: what a user calls it.
        holder: the globals of a module, the dict of a class, or a cell of a closure.
        name: the key in that dict.
    """

    label: str
    holder: Mapping[str, Any] | CellType
    name: str

    @property
    def value(self) -> Any:
        """What is there now; None if nothing is."""
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents if self.holder != CellType() else None
        return self.holder.get(self.name)


@attrs.frozen(eq=False)
class Surroundings:
    """What the forwards of a module can read.

    Attributes:
        places: what is guarded.
        clocks: names of the clocks that are read.
    """

    places: tuple[Place, ...]
    clocks: tuple[str, ...]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], *functions: Any) -> "Surroundings":
        """Read the code of the forwards of these modules, and of functions beside them."""
        reader = _Reader()
        for function in functions:
            reader.meet(function, "")
        for module in modules:
            reader.follow_method(type(module), "forward")
            for value in vars(module).values():
                if isinstance(value, FunctionType):
                    reader.follow(value, type(module))  # it may be given the module
                elif isinstance(value, MethodType | functools.partial):
                    reader.meet(value, "")
        return cls(tuple(reader.places.values()), tuple(sorted(reader.clocks)))

    def keys(self, room: Room) -> tuple[tuple[str, Any], ...]:
        """(label, key) of each value now; hashable.

        Args:
            room: limits what is looked into, and notes it.
        """
        return tuple((place.label, key_of(place.value, room)) for place in self.places)


class _Reader:
    """Reads functions, and those that they name."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], Place] = {}
        self.clocks: set[str] = set()
        self._seen: set[tuple[CodeType, type | None]] = set()

    def follow(self, function: FunctionType, kind: type | None = None) -> None:
        """Read a function; `kind` is the class that it is a method of."""
        code = function.__code__
        if (code, kind) in self._seen or len(self._seen) >= MOST or _is_theirs(function.__module__):
            return
        self._seen.add((code, kind))
        # What is no identifier nobody wrote: pytest puts such names into tests.
        names = frozenset(n for each in _codes(code) for n in each.co_names if n.isidentifier())
        for name in sorted(names & function.__globals__.keys()):
            self.meet(function.__globals__[name], name, names, function.__globals__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType():
                self.meet(cell.cell_contents, name, names, cell)
        if kind is not None:
            for name in sorted(names):
                self.follow_method(kind, name, names)

    def follow_method(self, kind: type, name: str, names: frozenset[str] = frozenset()) -> None:
        """Read what a class has by a name: a method, or a value that its instances share."""
        holder = next((base for base in kind.__mro__ if name in vars(base)), None)
        if holder is None or _is_theirs(holder.__module__):
            return
        found = vars(holder)[name]
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if isinstance(found, FunctionType):
            self.follow(found, kind)
        else:
            self.meet(found, name, names, vars(holder), f"{kind.__name__}.{name}")

    def meet(
        self,
        value: Any,
        name: str,
        names: frozenset[str] = frozenset(),
        holder: Mapping[str, Any] | CellType | None = None,
        label: str | None = None,
    ) -> None:
        """Follow a value that is named, or note where it is.

        Args:
            value: what is there.
            name: its key there.
            names: what else is named beside it: its attributes may be among them.
            holder: where it is; None if nobody could change it.
            label: what a user calls it; None for the name.
        """
        label = label or name
        if isinstance(value, FunctionType):
            self.follow(value)
        elif isinstance(value, MethodType):
            if isinstance(value.__func__, FunctionType):
                self.follow(value.__func__, type(value.__self__))
        elif isinstance(value, functools.partial):
            self.meet(value.func, name, names)
        elif isinstance(value, ModuleType):
            self._meet_module(value, label, names)
        elif isinstance(value, type):
            self._meet_class(value, label, names)
        elif getattr(value, "__module__", None) == "time" and getattr(value, "__name__", "") in _CLOCKS:
            self.clocks.add(f"time.{value.__name__}")
        elif holder is not None and not name.startswith("__"):
            self.places.setdefault((id(holder), name), Place(label, holder, name))

    def _meet_module(self, module: ModuleType, label: str, names: frozenset[str]) -> None:
        if module is time:
            self.clocks |= {f"time.{name}" for name in names & _CLOCKS}
        elif module is datetime and names & _DATES:
            self.clocks.add("datetime.now")
        elif not _is_theirs(module.__name__):
            for name in sorted(names & vars(module).keys()):
                found = vars(module)[name]
                if not isinstance(found, ModuleType | type):
                    self.meet(found, name, names, vars(module), f"{label}.{name}")

    def _meet_class(self, kind: type, label: str, names: frozenset[str]) -> None:
        if issubclass(kind, datetime.date) and names & _DATES:
            self.clocks.add("datetime.now")
        elif not _is_theirs(kind.__module__) and not issubclass(kind, nn.Module):
            for name in sorted(names):
                self.follow_method(kind, name, names)


def _is_theirs(module: str | None) -> bool:
    """Whether a module is one whose code is not read."""
    return (module or "").partition(".")[0] in _NOT_READ


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
