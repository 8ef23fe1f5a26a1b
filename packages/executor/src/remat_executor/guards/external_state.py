"""Guard what a forward reads outside of its module and its arguments: globals, classes, closures, clocks.

A captured graph contains the values of these at capture. So every name in the code of a forward is guarded,
like the module's own attributes. A clock cannot be guarded, so reading one gives a warning.

The code is read, not run: a name counts if a function mentions it. From a name the reader follows the
functions, methods of submodules' classes, fields of objects, and members of modules, classes and containers
found there; not into torch and the standard library, and at most `MOST` functions. Numbers and containers are
compared by value, functions by code and closure, other objects by identity and by their named fields.

Limits: a computed name, the environment, files and compiled extensions are not followed, nor a name that is
defined later.
"""

import datetime
import functools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
from torch import Tensor, nn

from remat_executor.inspection.attribute_keys import key_of
from remat_executor.inspection.object_contents import DEEPEST, PLAIN, Identity, TraversalLimit
from remat_executor.inspection.reads import Reads
from remat_executor.inspection.tensors import REGISTRIES

MOST = 500
"""At most this many functions are read for one module."""

MOST_ENTRIES = 100
"""A larger container is not searched for functions."""

_NOT_READ = frozenset({"torch", "numpy", "remat_executor", *sys.stdlib_module_names}) - {"__main__"}
_KINDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "localtime", "gmtime", "ctime")
_CLOCKS = frozenset(name for kind in _KINDS for name in (kind, f"{kind}_ns") if hasattr(time, name))
_DATES = frozenset({"now", "today", "utcnow"})
_ALWAYS = ("__call__", "__getattr__")  # run without being named
_BY_VALUE = (*PLAIN, dict, list, tuple, set, frozenset, np.ndarray, np.generic, Tensor)
_NONE: frozenset[str] = frozenset()

Holder = Mapping[str, Any] | CellType


def state_key(value: Any, limit: TraversalLimit | None = None, levels: int = DEEPEST) -> Any:
    """A hashable key of a value that a forward reads.

    Numbers and containers are compared by value, functions by code, defaults and closure, since a program may
    create an equal one at each step; everything else by identity.
    """
    if isinstance(value, _BY_VALUE):
        return key_of(value, limit)
    if levels and isinstance(value, MethodType):
        return (Identity(value.__self__), state_key(value.__func__, limit, levels))
    if levels and isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
        return (tuple(value.keywords), *(state_key(each, limit, levels - 1) for each in held))
    if levels and isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        held = (value.__defaults__, *(value.__kwdefaults__ or {}).values(), *cells)
        return (value.__code__, *(state_key(each, limit, levels - 1) for each in held))
    return Identity(value)


@attrs.frozen(eq=False)
class StateLocation:
    """A place outside of the module that a forward can read."""

    label: str  # its name for messages
    holder: Holder  # the globals of a module, the dict of a class or of an object, or a cell of a closure
    name: str  # the key in that dict
    owner: type | None = None  # for the dict of an object, its class

    def key(self, limit: TraversalLimit) -> Any:
        """A hashable key of the value now."""
        if isinstance(self.holder, CellType):
            return state_key(self.holder.cell_contents if self.holder != CellType() else None, limit)
        return state_key(self.holder.get(self.name), limit)


@attrs.frozen(eq=False)
class ExternalState:
    """What the forwards of a module can read outside of it."""

    places: tuple[StateLocation, ...]  # the guarded locations
    clocks: tuple[str, ...]  # names of the clocks that are read

    @classmethod
    def of(cls, modules: Iterable[nn.Module], *functions: Any) -> "ExternalState":
        """Read the code of these modules' forwards and of additional functions."""
        reader = _Reader()
        for function in functions:
            reader.meet(function)
        held = [thing for module in modules for thing in reader.add(module)]
        for thing in held:
            reader.meet(thing, frozenset(reader.names))
        return cls(tuple(reader.places.values()), tuple(sorted(reader.clocks)))

    def restricted(self, reads: Reads) -> "ExternalState":
        """Without the fields of objects that a capture did not read."""
        places = (p for p in self.places if p.owner is None or reads.include(p.owner, p.name))
        return attrs.evolve(self, places=tuple(places))

    def keys(self, limit: TraversalLimit) -> tuple[tuple[str, Any], ...]:
        """(label, key) of each value now; hashable. `limit` limits and records what is read."""
        return tuple((place.label, place.key(limit)) for place in self.places)


class _Reader:
    """Reads functions and follows the names in them."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], StateLocation] = {}
        self.clocks: set[str] = set()
        self.names: dict[str, None] = dict.fromkeys(("forward", *_ALWAYS))  # of all functions, in order
        self._kinds: dict[type, None] = {}  # of the submodules
        self._members: dict[type, Mapping[str, Any]] = {}
        self._functions: dict[int, FunctionType] = {}  # kept alive, since ids are reused
        self._met: dict[tuple[int, frozenset[str]], Any] = {}

    def add(self, module: nn.Module) -> Iterator[Any]:
        """Read the methods of a submodule that are named anywhere; yield the objects that it holds."""
        if type(module) not in self._kinds:
            self._kinds[type(module)] = None
            for name in list(self.names):
                self._member(type(module), name, _NONE)
        for name, value in vars(module).items():
            if name not in REGISTRIES and not isinstance(value, (nn.Module, Tensor, *PLAIN)):
                yield value

    def follow(self, function: FunctionType) -> None:
        """Read a function."""
        if id(function) in self._functions or len(self._functions) >= MOST or _is_theirs(function.__module__):
            return
        self._functions[id(function)] = function
        code = function.__code__
        # Names that are not identifiers are generated; pytest puts such names into tests.
        names = frozenset(n for each in _codes(code) for n in each.co_names if n.isidentifier())
        for name in sorted(names & function.__globals__.keys()):
            self.place(function.__globals__, name, name, names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType():
                self.place(cell, name, name, names)
        for name in sorted(names - self.names.keys()):
            self.names[name] = None
            for kind in list(self._kinds):
                self._member(kind, name, names)

    def place(
        self,
        holder: Holder,
        name: str,
        label: str,
        names: frozenset[str],
        levels: int = DEEPEST,
        owner: type | None = None,
    ) -> None:
        """Guard a location and follow its value to the members in `names`, at most `levels` deep."""
        value = holder.cell_contents if isinstance(holder, CellType) else holder[name]
        if not name.startswith("__") and not isinstance(value, ModuleType):
            self.places.setdefault((id(holder), name), StateLocation(label, holder, name, owner))
        self.meet(value, names, label, levels)

    def meet(self, value: Any, names: frozenset[str] = _NONE, label: str = "", levels: int = DEEPEST) -> None:
        """Follow a value to the members of it that are named."""
        if getattr(value, "__module__", None) == "time" and getattr(value, "__name__", "") in _CLOCKS:
            self.clocks.add(f"time.{value.__name__}")
        if not levels or (id(value), names) in self._met or isinstance(value, (nn.Module, Tensor, *PLAIN)):
            return
        if isinstance(value, FunctionType):
            self.follow(value)
            return
        self._met[id(value), names] = value
        if isinstance(value, MethodType):
            self.meet(value.__func__)
            if isinstance(value.__func__, FunctionType):
                self._fields(value.__self__, frozenset(value.__func__.__code__.co_names), label, levels)
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self.meet(inner, names, label, levels - 1)
        elif isinstance(value, ModuleType):
            self._module(value, names, label, levels)
        elif isinstance(value, type):
            self._class(value, names, label)
        elif isinstance(value, dict | list | tuple) and len(value) <= MOST_ENTRIES:
            for inner in value.values() if isinstance(value, dict) else value:
                self.meet(inner, names, label, levels - 1)
        else:
            self._fields(value, names, label, levels)

    def _module(self, module: ModuleType, names: frozenset[str], label: str, levels: int) -> None:
        if module is time:
            self.clocks |= {f"time.{name}" for name in names & _CLOCKS}
        elif module is datetime and names & _DATES:
            self.clocks.add("datetime.now")
        elif not _is_theirs(module.__name__):
            for name in sorted(names & vars(module).keys()):
                self.place(vars(module), name, f"{label}.{name}", names, levels - 1)

    def _class(self, kind: type, names: frozenset[str], label: str) -> None:
        if issubclass(kind, datetime.date) and names & _DATES:
            self.clocks.add("datetime.now")
        for name in sorted(names):
            self._member(kind, name, names)

    def _fields(self, thing: Any, names: frozenset[str], label: str, levels: int) -> None:
        """Follow the named fields of an object and members of its class."""
        simple = isinstance(thing, SimpleNamespace)
        if isinstance(thing, nn.Module) or (_is_theirs(type(thing).__module__) and not simple):
            return
        fields = getattr(thing, "__dict__", {})
        for name in sorted(names & fields.keys()):
            self.place(fields, name, f"{label}.{name}".lstrip("."), names, levels - 1, type(thing))
        for name in (*sorted(names), *_ALWAYS):
            self._member(type(thing), name, names)

    def _member(self, kind: type, name: str, names: frozenset[str]) -> None:
        """Follow a named member of a class and its bases: a method or a shared value."""
        for base in kind.__mro__:
            if name in vars(base) and not _is_theirs(base.__module__):
                found = vars(base)[name]
                if isinstance(found, property):
                    found = found.fget
                elif isinstance(found, staticmethod | classmethod):
                    found = found.__func__
                if name not in _ALWAYS or isinstance(found, FunctionType):
                    holder = self._members.setdefault(base, vars(base))  # `vars` creates a new proxy
                    place = StateLocation(f"{base.__name__}.{name}", holder, name)
                    self.places.setdefault((id(holder), name), place)
                self.meet(found, names, f"{base.__name__}.{name}")


def _is_theirs(module: str | None) -> bool:
    """Whether the code of a module is not read: torch, numpy, the standard library, this package."""
    return (module or "").partition(".")[0] in _NOT_READ


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all nested ones."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
