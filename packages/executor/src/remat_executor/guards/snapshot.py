"""A snapshot of a module, and a quick check whether it is still current.

Reading everything that a forward could notice costs about ten microseconds per submodule. Between two
training steps usually nothing changes, so a call only checks that all objects are still the same in the same
places, in loops that run in C. If anything differs, the module is read again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse
from operator import attrgetter, call, is_, itemgetter
from types import CellType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.guards.external_state import ExternalState
from remat_executor.guards.objections import objection
from remat_executor.guards.signature import OwnSignature, Signature, own_signature, signature, storages
from remat_executor.inspection.attribute_keys import is_guarded
from remat_executor.inspection.object_contents import Contents, TraversalLimit, contents_of, slots_of
from remat_executor.inspection.reads import EVERYTHING, Reads
from remat_executor.inspection.tensors import REGISTRIES, Owned, Tensors, owned_by
from remat_executor.torch_private.dict_versions import dict_versions, has_version
from remat_executor.torch_private.module_hooks import READ_REGISTRIES, hook_registries
from remat_executor.torch_private.tensors import layout_guard

_Taker = Callable[[dict[str, Any]], tuple[Any, ...]]
_ENCLOSED = attrgetter("cell_contents")
_NEEDED = frozenset(("training", *READ_REGISTRIES))


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """A module's state when it was read."""

    target: Any  # the function that runs instead of its forward; None for the forward
    owned: Owned  # its tensors
    own: OwnSignature  # its part of the signature of a call
    others: dict[Reads, OwnSignature]  # the same for fewer attributes, read when asked for
    external: ExternalState  # what its forwards can read outside of it
    complete: bool  # whether `own` has all that these attributes hold
    storages: dict[int, int]  # the place of its first tensor with each storage
    objection: str | None  # why it must run without a plan; None if a plan can serve
    is_current: Callable[[], bool]  # whether nothing of `own` has changed since

    @classmethod
    def take(cls, module: nn.Module, target: Any = None, reads: Reads = EVERYTHING) -> "Snapshot":
        """Read a module.

        Args:
            module: the module.
            target: the function that runs instead of its forward.
            reads: which attributes count.
        """
        owned, limit = owned_by(module), TraversalLimit(reads)
        first = storages(owned)
        # A scripted module keeps its state outside of its dict: it is read again at each call.
        readable = all(m.__dict__.keys() >= _NEEDED for _, m in owned.modules)
        external = ExternalState.of((m for _, m in owned.modules), module.forward, target)
        own = own_signature(owned, first, limit, external)  # records in `limit` what it reads
        return cls(
            target=target,
            owned=owned,
            own=own,
            others={},
            complete=not limit.exhausted,
            external=external,
            storages=first,
            objection=objection(owned),
            is_current=_ChangeDetector(owned, limit, external).unchanged if readable else bool,
        )

    def own_for(self, reads: Reads) -> OwnSignature:
        """The module's part of the signature with these attributes, which are among those of `own`."""
        if reads == self.own.reads:
            return self.own
        own = self.others.get(reads)
        if own is None:
            limit = TraversalLimit(reads)
            own = own_signature(self.owned, self.storages, limit, self.external)
            if self.complete:  # otherwise this may have read what `is_current` does not see
                self.others[reads] = own
        return own

    def signature(
        self, tensors: Tensors, device: torch.device | None = None, reads: Reads | None = None
    ) -> Signature:
        """The signature of a call.

        Args:
            tensors: the module's and the call's.
            device: where the call runs, if not where its tensors are.
            reads: which attributes count; None: those of `own`.
        """
        own = self.own if reads is None else self.own_for(reads)
        return signature(tensors, own, self.storages, device)


_FIELDS = attrgetter("__dict__")


class _ChangeDetector:
    """Everything that was read, in flat lists, so that a comparison takes a few loops in C."""

    def __init__(self, owned: Owned, limit: TraversalLimit, external: ExternalState) -> None:
        external = external.restricted(limit.reads)
        self.cells = [place.holder for place in external.places if isinstance(place.holder, CellType)]
        self.enclosed = [cell.cell_contents for cell in self.cells]
        named: dict[int, tuple[Any, list[str]]] = {}
        for place in external.places:
            if not isinstance(place.holder, CellType):
                named.setdefault(id(place.holder), (place.holder, []))[1].append(place.name)
        self.holders = [holder for holder, _ in named.values()]
        self.takers = [_taker(names) for _, names in named.values()]
        self.external = list(chain.from_iterable(map(call, self.takers, self.holders)))
        modules = [module for _, module in owned.modules]
        self.reads = limit.reads
        held = {(id(holder), key) for _, holder, key, _ in owned.plain}
        self.attributes = _Fields()
        self.owners: list[Any] = []  # of the dicts that hold their attributes
        self.owned: list[dict[str, Any]] = []
        for module in modules:
            fields = self.fields_of(module)
            own = [name for name in fields if name not in REGISTRIES]
            read = [
                name for name in own if (id(fields), name) in held or is_guarded(module, name, self.reads)
            ]
            self.attributes.add(fields, ["training", *READ_REGISTRIES, *read], {*own} - {*read})
        registries = [m.__dict__[name] for m in modules for name in ("_parameters", "_buffers", "_modules")]
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
            elif not any(holder is known for known in self.attributes.dicts):
                self.dicts.append(holder)
        self.typed: list[Any] = [*modules, *(thing for thing, _ in limit.found)]
        self.types = list(map(type, self.typed))
        self.whole = _Whole(filter(has_version, self.dicts))
        self.special = _Whole(filterfalse(has_version, self.dicts))
        self.versioned = [*self.attributes.dicts, *self.whole.dicts]
        self.all_have_versions = all(map(has_version, self.versioned))
        self.versions: list[int] | None = None
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
        elif found.kind != "fields" or not _only_fields(thing, found):
            self.others.append((thing, found))
        elif kind not in self.reads.kinds:
            self.dicts.append(self.fields_of(thing))
        else:
            read, fields = [name for name, _ in found.parts], self.fields_of(thing)
            self.attributes.add(fields, read, fields.keys() - {*read})

    def fields_of(self, thing: Any) -> dict[str, Any]:
        """The dict of an object's attributes, which may be replaced as a whole."""
        fields: dict[str, Any] = thing.__dict__
        self.owners.append(thing)
        self.owned.append(fields)
        return fields

    def unchanged(self) -> bool:
        """Whether everything is the same as before."""
        try:
            return (
                _same(map(_FIELDS, self.owners), self.owned)
                and self.unwritten()
                and self.special.unchanged()
                and list(map(len, self.lists)) == self.lengths
                and _same(chain.from_iterable(self.lists), self.items)
                and _same(map(type, self.typed), self.types)
                and _same(chain.from_iterable(map(call, self.takers, self.holders)), self.external)
                and _same(map(_ENCLOSED, self.cells), self.enclosed)
                and not any(self.empty)
                and self.laid_out()
                and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
                and all(len(thing) == length for thing, length in self.counted)
                and all(_unchanged(thing, found, self.reads) for thing, found in self.others)
            )
        except (KeyError, ValueError, RuntimeError):  # something is gone or changed by another thread
            return False

    def unwritten(self) -> bool:
        """Whether the dicts with versions are the same as before: compared only if one was written since.

        They hold most of what was read, all over the memory: to look at it takes several times as long as to
        ask for the versions.
        """
        # Read before the comparison, during which another thread may write.
        versions = dict_versions(self.versioned) if self.all_have_versions else None
        if versions is not None and versions == self.versions:
            return True
        same = self.attributes.unchanged() and self.whole.unchanged()
        self.versions = versions if same else None
        return same


class _Whole:
    """Dicts of which all keys, their order and all values count."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self.dicts = list(dicts)
        self.keys = list(chain.from_iterable(self.dicts))
        self.values = list(chain.from_iterable(map(dict.values, self.dicts)))

    def unchanged(self) -> bool:
        """Whether the dicts have the same keys in the same order, and the same values."""
        return list(chain.from_iterable(self.dicts)) == self.keys and _same(
            chain.from_iterable(map(dict.values, self.dicts)), self.values
        )


class _Fields:
    """The dicts of modules and objects, of which a step depends on some values.

    If all keys of a dict exist and their number is unchanged, none was added. A module's other registries are
    not looked up: every module has them.
    """

    def __init__(self) -> None:
        self.dicts: list[dict[str, Any]] = []
        self.counts: list[int] = []
        self.readers: list[_Taker] = []
        self.read: list[Any] = []
        self.partly_read: list[dict[str, Any]] = []
        self.finders: list[_Taker] = []

    def add(self, fields: dict[str, Any], read: Sequence[str], unread: Collection[str]) -> None:
        """Add a dict with the keys whose values count and those whose existence counts."""
        self.dicts.append(fields)
        self.counts.append(len(fields))
        self.readers.append(_taker(read))
        self.read.extend(self.readers[-1](fields))
        if unread:
            self.partly_read.append(fields)
            self.finders.append(_taker(list(unread)))

    def unchanged(self) -> bool:
        """Whether the dicts have the same keys and the same values that count.

        Raises:
            KeyError: one that does not count is gone.
        """
        return (
            list(map(len, self.dicts)) == self.counts
            and _same(chain.from_iterable(map(call, self.readers, self.dicts)), self.read)
            and not deque(map(call, self.finders, self.partly_read), maxlen=0)
        )


def _taker(names: Sequence[str]) -> _Taker:
    """A function that takes the values of these keys from a dict."""
    if not names:
        return lambda _: ()
    return itemgetter(*names, names[0])  # with a single name, it would not return a tuple


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    return all(map(is_, now, before))


def _only_fields(thing: Any, found: Contents) -> bool:
    """Whether an object's dict is its whole state."""
    fields = getattr(thing, "__dict__", None)
    if type(fields) is not dict or any(map(slots_of, type(thing).__mro__)):
        return False
    return all(name in fields for name, _ in found.parts)


def _unchanged(thing: Any, before: Contents, reads: Reads) -> bool:
    now = contents_of(thing, TraversalLimit(reads))
    if now is None or len(now.parts) != len(before.parts):
        return False
    if before.kind == "numbers":
        return now.parts == before.parts
    pairs = zip(_flat(now), _flat(before), strict=True)
    return all(one is other for one, other in pairs)


def _flat(found: Contents) -> Iterator[Any]:
    for name, part in found.parts:
        yield from (name, part)
