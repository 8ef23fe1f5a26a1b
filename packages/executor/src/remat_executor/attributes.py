"""What a forward sets on its module, which no graph captures.

It would be lost, since the graph runs and the Python code does not: capture puts it back, refuses what counts
or accumulates, and says what is only kept to be seen. What a forward reads is guarded, see
`remat_executor.settings`.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from remat_executor.settings import DEEPEST, MOST, PLAIN, exactly
from remat_executor.tensors import REGISTRIES

_COUNTS = (bool, int, float, complex, str)
_MISSING = object()


@attrs.define
class Changes:
    """What a forward changed, by name.

    Attributes:
        state: numbers and texts, and what containers hold: a later call would read them.
        kept: what is merely put there to be seen, such as the last hidden tensor.
    """

    state: list[str] = attrs.field(factory=list)
    kept: list[str] = attrs.field(factory=list)


@contextlib.contextmanager
def kept_attributes(module: nn.Module) -> Iterator[Changes]:
    """Put back what a forward sets on its submodules and in what they hold; say at the end what it was."""
    changes = Changes()
    places = list(_places(module))
    try:
        yield changes
    finally:
        for place in places:
            place.compare(changes)
            place.restore()


@attrs.frozen(eq=False)
class _Place:
    """Something that a forward can change, and what was in it.

    Attributes:
        name: what a user calls it; empty for the module itself.
        thing: a module's or object's dict, or a container.
        before: a copy of its content.
        kind: "attributes" of a submodule, "fields" of an object, or "items" of a container.
    """

    name: str
    thing: Any
    before: Any
    kind: str

    def compare(self, changes: Changes) -> None:
        """Note what is different now."""
        before, after = _by_key(self.before), _by_key(self.thing)
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key, _MISSING), after.get(key, _MISSING)
            if old is new or (isinstance(old, PLAIN) and exactly(old) == exactly(new)):
                continue
            name = f"{self.name}[{key!r}]" if self.kind == "items" else f"{self.name}.{key}".lstrip(".")
            private = any(part.startswith("_") for part in name.split("."))
            if isinstance(old, _COUNTS) or (
                self.kind == "items" and not private and not _has_tensor(old, new)
            ):
                changes.state.append(name)
            elif self.kind != "fields" and not private:
                # A field that was None is a default, filled in at the first call and again at the next.
                changes.kept.append(name)

    def restore(self) -> None:
        """Put the content back, if it is another."""
        thing, before = self.thing, self.before
        same = len(thing) == len(before) and all(a is b for a, b in zip(thing, before, strict=True))
        if isinstance(thing, dict):
            same = same and all(thing[key] is before[key] for key in before)
        if same:
            return
        thing.clear()
        if isinstance(thing, dict | set):
            thing.update(before)
        else:
            thing.extend(before)


def _by_key(content: Any) -> Mapping[Any, Any]:
    if isinstance(content, dict):
        return content
    if isinstance(content, set):
        return dict.fromkeys(content)
    return dict(enumerate(content))


def _has_tensor(*values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _places(module: nn.Module) -> Iterator[_Place]:
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        attributes = submodule.__dict__
        yield _Place(prefix, attributes, dict(attributes), "attributes")
        for registry in REGISTRIES:
            if registry.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                # Named as private, so not spoken of: transformers installs its own at the first call.
                hooks = attributes[registry]
                yield _Place("_", hooks, dict(hooks), "fields")
        own = [(f"{prefix}.{k}".lstrip("."), v) for k, v in attributes.items() if k not in REGISTRIES]
        yield from _inside(own, DEEPEST, seen)


def _inside(named: Iterable[tuple[str, Any]], levels: int, seen: set[int]) -> Iterator[_Place]:
    """The containers and objects among these values, and those in them."""
    for name, value in named:
        if id(value) in seen or isinstance(value, (Tensor, nn.Module, type, *PLAIN)):
            continue
        seen.add(id(value))
        fields = getattr(value, "__dict__", None)
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            yield _Place(name, value, dict(value), "items")
            inner = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | deque):
            yield _Place(name, value, list(value), "items")
            inner = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, set):
            yield _Place(name, value, set(value), "items")
        elif isinstance(value, tuple):
            inner = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(fields, dict) and not callable(value):
            yield _Place(name, fields, dict(fields), "fields")
            inner = [(f"{name}.{key}", item) for key, item in fields.items()]
        if levels > 1 and len(inner) <= MOST:
            yield from _inside(inner, levels - 1, seen)
