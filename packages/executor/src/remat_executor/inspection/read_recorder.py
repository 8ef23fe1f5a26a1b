"""Record which attributes of modules and of the objects that they hold a capture reads.

While a capture runs, `__getattribute__` of `nn.Module` and of the classes of these objects is replaced by a
method that records the name and goes on. This sees computed names, absent names, properties, helpers and the
code of libraries, and leaves `type(self)` unchanged. Where an object is read as a whole (`vars`, `copy`,
`pickle`), every attribute of its class counts as read; so does every attribute of a class that cannot be
observed: one that bypasses its bases in its own `__getattribute__`, or that is immutable.

Compiled functions read attributes in C++: if one runs during a capture, every attribute counts as read. So
it does while another thread records.

Limits: `object.__getattribute__(self, name)` and `inspect.getattr_static` are not seen.
"""

import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from remat_executor.inspection.attribute_keys import attribute_keys, exact_key
from remat_executor.inspection.object_contents import PLAIN, TraversalLimit
from remat_executor.inspection.reads import EVERYTHING, Reads
from remat_executor.torch_private.dynamo import before_compiled_calls
from remat_graph.contexts import context

_METHOD = "__getattribute__"
_WHOLE = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__", "__dir__"})
_OF_EVERY_OBJECT = frozenset(dir(object)) | {"__dict__", "__weakref__", "__annotations__"}
_ABSENT = object()
_ONE_AT_A_TIME = threading.Lock()


def _codes(*functions: Any) -> frozenset[CodeType]:
    return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))


# These look up in `__dict__` only registries and the name that they were asked for.
_ONE_NAME = _codes(
    *(nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.__delattr__),
    *(nn.Module.register_parameter, nn.Module.register_buffer),
    vars(functools.cached_property)["__get__"],
)


class ReadRecorder:
    """Records the reads of captures; without one, every attribute counts as read."""

    def __init__(self) -> None:
        self.reads = EVERYTHING
        self._names: set[str] = set()
        self._whole: set[int] = set()  # ids of dicts
        self._changed: dict[type, Any] = {}  # classes, with the methods that were replaced
        self._stopped = False

    @context
    def recording(self, module: nn.Module) -> Generator[None, None, None]:
        """A context in which reads are recorded; `reads` has them at its end, also after an error."""
        held: list[Any] = []  # nothing, and no kinds, where Ctrl-C comes first
        kinds: list[type] = []
        locked = False
        try:
            locked = _ONE_AT_A_TIME.acquire(blocking=False)
            if locked:
                held = _held(module)
                kinds = self._observe(dict.fromkeys(map(type, held)))
                with before_compiled_calls(self._give_up):
                    yield
            else:
                yield
        finally:
            if locked:
                self._restore()
                _ONE_AT_A_TIME.release()
                if not self._stopped:
                    whole = {type(thing) for thing in held if id(_fields(thing)) in self._whole}
                    self.reads = Reads(frozenset(self._names), frozenset(kinds) - whole)

    def _give_up(self) -> None:
        """Stop before a compiled function runs: Dynamo must find the classes unchanged."""
        self._stopped = True
        self._restore()

    def _restore(self) -> None:
        for kind, before in self._changed.items():
            if before is None:
                if _METHOD in vars(kind):  # not yet where Ctrl-C came right before
                    type.__delattr__(kind, _METHOD)
            else:
                type.__setattr__(kind, _METHOD, before)
        self._changed.clear()

    def _observe(self, kinds: Iterable[type]) -> list[type]:
        """Replace the method of these classes or of a base; return those of which all reads are seen."""
        found = []
        for kind in kinds:
            place = _place(kind)
            if place is None:
                continue
            if place not in self._changed:
                before = vars(place).get(_METHOD)
                method = self._recording(place) if before is None else self._checking(before)
                self._changed[place] = before  # noted first, so that Ctrl-C leaves no class changed
                try:
                    type.__setattr__(place, _METHOD, method)
                except TypeError:  # an immutable class
                    del self._changed[place]
                    continue
            found.append(kind)
        return found

    def _recording(self, kind: type) -> Callable[[Any, str], Any]:
        """A method for a class without one, which records and goes on."""
        names, note_whole = self._names, self._note_whole

        def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807 - its name in tracebacks
            names.add(name)
            if name in _WHOLE:
                note_whole(self, sys._getframe(1))
            return super(kind, self).__getattribute__(name)  # type: ignore[arg-type]

        return __getattribute__

    def _checking(self, method: FunctionType) -> Callable[[Any, str], Any]:
        """A class's own method, which no other follows; what it names or does not pass on counts as read."""
        named = method.__code__.co_names
        values = (*method.__code__.co_consts, *(method.__globals__.get(name) for name in named))
        self._names.update(named, (value for value in values if isinstance(value, str)))

        def __getattribute__(thing: Any, name: str) -> Any:  # noqa: N807 - its name in tracebacks
            self._names.add(name)
            if name in _WHOLE:
                self._note_whole(thing, sys._getframe(1))
            try:
                value = method(thing, name)
            except AttributeError:
                if name in _fields(thing) or hasattr(type(thing), name):
                    self._all_of(thing)
                raise
            if not _passes(thing, name, value):
                self._all_of(thing)
            return value

        return __getattribute__

    def _note_whole(self, thing: Any, frame: Any) -> None:
        if frame.f_code in _ONE_NAME or frame.f_globals.get("__name__", "").startswith("remat_executor."):
            return
        self._all_of(thing)

    def _all_of(self, thing: Any) -> None:
        fields = _fields(thing)
        self._whole.add(id(fields))  # two objects may share one dict, as a planned module and its original do
        self._names.update(key for key in fields if isinstance(key, str))


def _fields(thing: Any) -> dict[Any, Any]:
    try:
        found: dict[Any, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:  # slots alone
        return {}
    return found


def _held(module: nn.Module) -> list[Any]:
    """All submodules and the objects with fields that they hold."""
    submodules = list(module.modules())
    limit = TraversalLimit()
    attribute_keys(submodules, limit)
    objects = (thing for thing, found in limit.found if found.kind == "fields")
    return [*submodules, *(o for o in objects if not isinstance(o, FunctionType | functools.partial))]


def _place(kind: type) -> type | None:
    """The class whose method all reads of a class's objects pass; None if there is none.

    A class with a `__getattribute__` of its own may map names, as configs of transformers do: the method that
    it calls in its bases is asked for the right one.
    """
    bases = kind.__mro__[:-1]
    first = bases.index(nn.Module) if issubclass(kind, nn.Module) else 0
    own = [i for i, base in enumerate(bases) if _METHOD in vars(base) and not _is_ours(vars(base)[_METHOD])]
    if not all(map(_calls_bases, (vars(bases[i])[_METHOD] for i in own))):
        return None
    last = max(own, default=-1)
    if first:
        return bases[first] if last < first else None
    return bases[min(last + 1, len(bases) - 1)]


def _is_ours(method: Any) -> bool:
    return getattr(method, "__module__", None) == __name__


def _calls_bases(method: Any) -> bool:
    names = method.__code__.co_names if isinstance(method, FunctionType) else ()
    return "super" in names and "object" not in names


def _passes(thing: Any, name: str, value: Any) -> bool:
    """Whether a class's own `__getattribute__` gave what its bases give for this name."""
    fields = _fields(thing)
    found = next((vars(base)[name] for base in type(thing).__mro__ if name in vars(base)), _ABSENT)
    if isinstance(found, property) and found.fget is not None:
        again = found.fget(thing)
        if isinstance(value, PLAIN):
            return exact_key(again) == exact_key(value)
        return again is value or (
            type(again) is type(value) and all(value is not held for held in fields.values())
        )
    if name in fields:
        return fields[name] is value
    if isinstance(found, FunctionType):
        return isinstance(value, MethodType) and value.__func__ is found
    if isinstance(found, classmethod):
        return isinstance(value, MethodType) and value.__func__ is found.__func__
    if isinstance(found, staticmethod):
        return value is found.__func__
    return found is value or name in _OF_EVERY_OBJECT
