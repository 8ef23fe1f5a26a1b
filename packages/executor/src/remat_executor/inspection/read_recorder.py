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
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from remat_executor.inspection.attribute_keys import attribute_keys
from remat_executor.inspection.object_contents import TraversalLimit
from remat_executor.inspection.reads import EVERYTHING, Reads
from remat_executor.torch_private.dynamo import compiled_calls
from remat_graph.contexts import context

_METHOD = "__getattribute__"
_WHOLE = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__", "__dir__"})
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

    @context
    def recording(self, module: nn.Module) -> Generator[None, None, None]:
        """A context in which reads are recorded; `reads` has them at its end, also after an error."""
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            yield
            return
        changed: list[type] = []
        try:
            with compiled_calls() as compiled:
                held = _held(module)
                kinds = self._observe(dict.fromkeys(map(type, held)), changed)
                try:
                    yield
                finally:
                    if not compiled:
                        whole = {type(thing) for thing in held if id(_fields(thing)) in self._whole}
                        self.reads = Reads(frozenset(self._names), frozenset(kinds) - whole)
        finally:
            for kind in changed:
                type.__delattr__(kind, _METHOD)
            _ONE_AT_A_TIME.release()

    def _observe(self, kinds: Iterable[type], changed: list[type]) -> list[type]:
        """Replace the method of these classes or of a base; return those of which all reads are seen."""
        found = []
        for kind in kinds:
            place = _place(kind)
            if place is None:
                continue
            if place not in changed:
                try:
                    type.__setattr__(place, _METHOD, self._recording_method(place))
                except TypeError:  # an immutable class
                    continue
                changed.append(place)
            found.append(kind)
        return found

    def _recording_method(self, kind: type) -> Callable[[Any, str], Any]:
        names, note_whole = self._names, self._note_whole

        def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807 - its name in tracebacks
            names.add(name)
            if name in _WHOLE:
                note_whole(self, sys._getframe(1))
            return super(kind, self).__getattribute__(name)

        return __getattribute__

    def _note_whole(self, thing: Any, frame: Any) -> None:
        if frame.f_code in _ONE_NAME or frame.f_globals.get("__name__", "").startswith("remat_executor."):
            return
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
    """The class at which all reads of a class's objects pass; None if there is none.

    A class with a `__getattribute__` of its own may map names, as configs of transformers do: the method that
    it calls in its bases is asked for the right one.
    """
    bases = kind.__mro__[:-1]
    place = bases.index(nn.Module) if issubclass(kind, nn.Module) else 0
    for i, base in enumerate(bases):
        own = vars(base).get(_METHOD)
        if own is None or getattr(own, "__module__", None) == __name__:
            continue
        names = own.__code__.co_names if isinstance(own, FunctionType) else ()
        if "super" not in names or "object" in names or (issubclass(kind, nn.Module) and i >= place):
            return None
        place = max(place, i + 1)
    return bases[place] if place < len(bases) else None
