"""A snapshot of a module, and a quick check whether it is still current.

Reading everything that a forward could notice costs about ten microseconds per submodule. Between two
training steps usually nothing changes, so a call only checks that all objects are still the same in the same
places, in loops that run in C. If anything differs, the module is read again.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import CellType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.guards.external_state import ExternalState
from remat_executor.guards.objections import objection
from remat_executor.guards.signature import OwnSignature, Signature, own_signature, signature, storages
from remat_executor.inspection.object_contents import Contents, TraversalLimit, contents_of
from remat_executor.inspection.tensors import REGISTRIES, Owned, Tensors, owned_by
from remat_executor.torch_private.module_hooks import READ_REGISTRIES, hook_registries
from remat_executor.torch_private.tensors import layout_guard

_ENCLOSED = attrgetter("cell_contents")
_NEEDED = frozenset(("training", *READ_REGISTRIES))


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """A module's state when it was read."""

    target: Any  # the function that runs instead of its forward; None for the forward
    owned: Owned  # its tensors
    own: OwnSignature  # its part of the signature of a call
    storages: dict[int, int]  # the place of its first tensor with each storage
    objection: str | None  # why it must run without a plan; None if a plan can serve
    clocks: tuple[str, ...]  # names of the clocks that its forwards read
    is_current: Callable[[], bool]  # whether nothing has changed since

    @classmethod
    def take(cls, module: nn.Module, target: Any = None) -> "Snapshot":
        """Read a module; `target` is the function that runs instead of its forward."""
        owned, limit = owned_by(module), TraversalLimit()
        first = storages(owned)
        # A scripted module keeps its state outside of its dict: it is read again at each call.
        readable = all(m.__dict__.keys() >= _NEEDED for _, m in owned.modules)
        external = ExternalState.of((m for _, m in owned.modules), module.forward, target)
        own = own_signature(owned, first, limit, external)  # records in `limit` what it reads
        return cls(
            target=target,
            owned=owned,
            own=own,
            storages=first,
            objection=objection(owned),
            clocks=external.clocks,
            is_current=_ChangeDetector(owned, limit, external).unchanged if readable else bool,
        )

    def signature(self, tensors: Tensors, device: torch.device | None = None) -> Signature:
        """The signature of a call with these tensors; `device` is where it runs, if not where they are."""
        return signature(tensors, self.own, self.storages, device)


class _ChangeDetector:
    """Everything that was read, in flat lists, so that a comparison takes a few loops in C."""

    def __init__(self, owned: Owned, limit: TraversalLimit, external: ExternalState) -> None:
        self.cells = [place.holder for place in external.places if isinstance(place.holder, CellType)]
        self.enclosed = [cell.cell_contents for cell in self.cells]
        named: dict[int, tuple[Any, list[str]]] = {}
        for place in external.places:
            if not isinstance(place.holder, CellType):
                named.setdefault(id(place.holder), (place.holder, []))[1].append(place.name)
        self.holders = [holder for holder, _ in named.values()]
        # With a single name, `itemgetter` would not return a tuple.
        self.takers = [itemgetter(*names, names[0]) for _, names in named.values()]
        self.external = list(chain.from_iterable(map(call, self.takers, self.holders)))
        modules = [module for _, module in owned.modules]
        self.attributes = [module.__dict__ for module in modules]
        self.counts = list(map(len, self.attributes))
        self.readers = [_reader(attributes) for attributes in self.attributes]
        self.read = list(chain.from_iterable(map(call, self.readers, self.attributes)))
        registries = [m[name] for m in self.attributes for name in ("_parameters", "_buffers", "_modules")]
        registries += [registry for m in modules for registry in hook_registries(m)]
        self.empty = [registry for registry in registries if not registry]
        self.dicts: list[dict[Any, Any]] = [registry for registry in registries if registry]
        self.lists: list[list[Any]] = []
        self.others: list[tuple[Any, Contents]] = []
        self.counted = [(thing, len(thing)) for thing in limit.counted]
        for thing, found in limit.found:
            self.add(thing, found)
        for _, holder, _, _ in owned.plain:
            if isinstance(holder, list):
                self.lists.append(holder)
            elif not any(holder is known for known in self.attributes):
                self.dicts.append(holder)
        self.typed: list[Any] = [*modules, *(thing for thing, _ in limit.found)]
        self.types = list(map(type, self.typed))
        self.keys = list(chain.from_iterable(self.dicts))
        self.values = list(chain.from_iterable(map(dict.values, self.dicts)))
        self.lengths = list(map(len, self.lists))
        self.items = list(chain.from_iterable(self.lists))
        self.tensors = owned.tensors
        self.laid_out = layout_guard(self.tensors)
        try:
            self.addresses = list(map(Tensor.data_ptr, self.tensors))
        except RuntimeError:  # a tensor without memory of its own, such as a shard: never current
            self.laid_out = bool

    def add(self, thing: Any, found: Contents) -> None:
        """Add one object that was read."""
        kind = type(thing)
        if issubclass(kind, tuple | frozenset):
            return  # immutable; its items are added separately
        if issubclass(kind, list):
            self.lists.append(thing)
        elif issubclass(kind, dict) and all(type(key) is str for key in thing):
            self.dicts.append(thing)
        elif found.kind == "fields" and _only_fields(thing, found):
            self.dicts.append(thing.__dict__)
        else:
            self.others.append((thing, found))

    def unchanged(self) -> bool:
        """Whether everything is the same as before."""
        try:
            return (
                list(map(len, self.attributes)) == self.counts
                and _same(chain.from_iterable(map(call, self.readers, self.attributes)), self.read)
                and list(chain.from_iterable(self.dicts)) == self.keys
                and _same(chain.from_iterable(map(dict.values, self.dicts)), self.values)
                and list(map(len, self.lists)) == self.lengths
                and _same(chain.from_iterable(self.lists), self.items)
                and _same(map(type, self.typed), self.types)
                and _same(chain.from_iterable(map(call, self.takers, self.holders)), self.external)
                and _same(map(_ENCLOSED, self.cells), self.enclosed)
                and not any(self.empty)
                and self.laid_out()
                and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
                and all(len(thing) == length for thing, length in self.counted)
                and all(_unchanged(thing, found) for thing, found in self.others)
            )
        except (KeyError, ValueError, RuntimeError):  # something is gone or changed by another thread
            return False


def _reader(attributes: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that reads from a module's dict what a step depends on.

    If all these keys exist and their number is unchanged, no attribute was renamed: the others are registries
    that every module has.
    """
    own = (name for name in attributes if name not in REGISTRIES)
    return itemgetter("training", *READ_REGISTRIES, *own)


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    return all(map(is_, now, before))


def _only_fields(thing: Any, found: Contents) -> bool:
    """Whether an object's dict is its whole state."""
    fields = getattr(thing, "__dict__", None)
    return type(fields) is dict and len(fields) == len(found.parts)


def _unchanged(thing: Any, before: Contents) -> bool:
    now = contents_of(thing, TraversalLimit())
    if now is None or len(now.parts) != len(before.parts):
        return False
    if before.kind == "numbers":
        return now.parts == before.parts
    pairs = zip(_flat(now), _flat(before), strict=True)
    return all(one is other for one, other in pairs)


def _flat(found: Contents) -> Iterator[Any]:
    for name, part in found.parts:
        yield from (name, part)
