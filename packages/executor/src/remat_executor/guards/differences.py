"""What differs between two calls, for messages: of which kind it is, and the old and the new values."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from remat_executor.guards.signature import Signature
from remat_graph.errors import shown

_MOST = 3  # entries of one kind that are named
_MODE = {True: "train", False: "eval"}


@attrs.frozen(kw_only=True)
class Difference:
    """One kind of difference: a field of the signature, in words, and the entries that differ."""

    kind: str
    entries: tuple[str, ...] = ()
    shapes: bool = False  # whether only the shapes of inputs differ

    def __str__(self) -> str:
        more = ["..."] if len(self.entries) > _MOST else []
        named = ", ".join([*self.entries[:_MOST], *more])
        return f"{self.kind} ({named})" if named else self.kind


def differences(old: Signature, new: Signature, labels: Sequence[str] = ()) -> list[Difference]:
    """The kinds of differences between two calls; `labels` names the leaves of the new call's arguments."""
    found = []
    if old.own.modules != new.own.modules:
        found.append(_of_modules(old, new))
    for kind in ("attributes", "external_state"):
        before, after = getattr(old.own, kind), getattr(new.own, kind)
        if before != after:
            found.append(Difference(kind=kind.replace("_", " "), entries=_of_entries(before, after)))
    for kind in ("parameters", "buffers"):
        before, after = getattr(old.own, kind), getattr(new.own, kind)
        if before != after:
            found.append(Difference(kind=kind, entries=tuple(_of_tensors(before, after))))
    if (old.own.sharing, old.sharing) != (new.own.sharing, new.sharing):
        found.append(Difference(kind="sharing"))
    if old.inputs != new.inputs:
        found.append(_of_inputs(old, new, labels))
    if old.constants != new.constants:
        found.append(Difference(kind="arguments", entries=_of_constants(old, new, labels)))
    if old.spec != new.spec:
        found.append(Difference(kind="structure of the arguments"))
    if old.flags != new.flags:
        found.append(Difference(kind="flags", entries=_of_entries(old.flags, new.flags)))
    if old.forward != new.forward:
        found.append(Difference(kind="forward"))
    return found


def way_out(found: Iterable[Difference]) -> str:
    """What a user can do to avoid these differences; empty if nothing is known."""
    advice = []
    found = [*found]
    structure = any(each.kind == "structure of the arguments" for each in found)
    for difference in found:
        if difference.shapes:
            advice.append("buckets= pads lengths, so that few plans serve all")
            advice.append("drop_last=True of a DataLoader leaves out a smaller last batch")
        elif difference.kind == "arguments" and not structure:
            advice.append("if they change often, pass tensors")
        elif difference.kind in ("attributes", "external state"):
            advice.append("if they change often, hold them in tensors")
    return "; ".join(dict.fromkeys(advice))


def _of_modules(first: Signature, second: Signature) -> Difference:
    before, after = first.own.modules, second.own.modules
    structure = [[(name, kind, children) for name, kind, _, children in each] for each in (before, after)]
    if structure[0] != structure[1]:
        return Difference(kind="modules")
    changed = [
        (one[2], other[2], one[0]) for one, other in zip(before, after, strict=True) if one[2] != other[2]
    ]
    was, now, name = changed[0]
    where = f"{name}: " if name else ""
    return Difference(kind="mode", entries=(f"{where}{_MODE[was]} -> {_MODE[now]}",))


def _of_entries(before: Sequence[tuple[Any, Any]], after: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
    """The named values that differ; a name occurs once for each module that has it."""
    names = [name for name, _ in before] == [name for name, _ in after]
    if names:
        pairs = zip(before, after, strict=True)
        entries = [_change(one[0], one[1], other[1]) for one, other in pairs if one != other]
    else:
        entries = sorted({str(name) for name, _ in {*before} ^ {*after}})
    return tuple(dict.fromkeys(entries))


def _change(name: str, old: Any, new: Any) -> str:
    """One value's change; within containers and objects, that of the first item that differs."""
    inside = _items(old), _items(new)
    if inside[0] and inside[0].keys() == inside[1].keys():
        for key in inside[0]:
            if inside[0][key] != inside[1][key]:
                return _change(f"{name}.{key}", inside[0][key], inside[1][key])
    values = [_value(key) for key in (old, new)]
    return name if None in values else f"{name}: {values[0]} -> {values[1]}"


def _items(key: Any) -> dict[str, Any]:
    """The parts of a container's or object's key by their names."""
    if not isinstance(key, tuple) or len(key) < 2:
        return {}
    if not all(isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) for part in key[1:]):
        return {}
    return dict(key[1:])


def _value(key: Any) -> str | None:
    """A number, string or the like, from its key; None if it is something else."""
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], type):
        return None
    kind, value = key
    if kind is float:
        return shown(float.fromhex(value))
    return shown(value) if type(value) is kind else None


def _of_tensors(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    layouts = {names[0]: layout for names, *layout in before}
    for names, *layout in after:
        if layouts.pop(names[0], None) != layout:
            yield names[0]
    yield from layouts


def _of_inputs(old: Signature, new: Signature, labels: Sequence[str]) -> Difference:
    (leaves, slots, *before), (other_leaves, other_slots, *after) = old.inputs, new.inputs
    if leaves != other_leaves or slots != other_slots:
        held = sorted({name for name, _ in {*slots} ^ {*other_slots}})
        return Difference(kind="inputs", entries=tuple(held))
    entries, others = [], 0
    for place, ((was, needed), (now, needs)) in enumerate(zip(before, after, strict=True)):
        label = _label(place, leaves, slots, labels)
        parts = [f"{_shown(one)} -> {_shown(other)}" for one, other in _layouts(was, now) if one != other]
        others += was[:1] + was[3:] != now[:1] + now[3:] or needed != needs
        if needed != needs:
            parts.append(f"requires_grad {needed} -> {needs}")
        if was != now and not parts:
            parts.append("strides")
        if parts:
            entries.append(f"{label} {', '.join(parts)}")
    return Difference(kind="inputs", entries=tuple(entries), shapes=not others)


def _layouts(was: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """The shapes, dtypes and devices of two layouts."""
    return ((was[i], now[i]) for i in (1, 0, 3))


def _shown(part: Any) -> str:
    if isinstance(part, tuple):
        return "x".join(map(str, part)) or "scalar"
    return str(part).removeprefix("torch.")


def _label(place: int, leaves: Sequence[int | None], slots: Sequence[Any], labels: Sequence[str]) -> str:
    if place not in leaves:
        return "a tensor in an attribute"
    leaf = leaves.index(place)
    return labels[leaf] if leaf < len(labels) else f"input {place}"


def _of_constants(old: Signature, new: Signature, labels: Sequence[str]) -> tuple[str, ...]:
    pairs = itertools.zip_longest(old.constants, new.constants)
    names = [*labels, *(f"leaf {i}" for i in range(len(labels), len(new.constants)))]
    return tuple(_change(name, *pair) for name, pair in zip(names, pairs, strict=False) if pair[0] != pair[1])
