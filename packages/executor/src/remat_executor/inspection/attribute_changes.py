"""What a forward sets on its module, which no graph captures.

It would be lost, since the graph runs and the Python code does not: capture puts it back, refuses what counts
or accumulates, and says what is only kept to be seen. What a forward reads is guarded, see
`remat_executor.inspection.attribute_keys`; both look at the same things.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import attrs
from torch import Tensor, nn

from remat_executor.inspection.attribute_keys import exact_key
from remat_executor.inspection.object_contents import DEEPEST, PLAIN, Contents, TraversalLimit, contents_of
from remat_executor.inspection.tensors import REGISTRIES
from remat_graph.contexts import context

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


@context
def restored_attributes(module: nn.Module) -> Generator[Changes, None, None]:
    """Put back what a forward sets on its submodules and in what they hold; say at the end what it was."""
    changes = Changes()
    containers = list(_containers(module))
    try:
        yield changes
    finally:
        for container in containers:
            container.compare(changes)
            container.before.restore()


@attrs.frozen(eq=False)
class _Container:
    """Something that a forward can change, and what was in it.

    Attributes:
        name: what a user calls it; empty for the module itself.
        thing: the module's dict, or something that it holds.
        kind: "attributes" or "registry" of a submodule, else as in `Contents`.
        before: what was in it.
    """

    name: str
    thing: Any
    kind: str
    before: Contents

    def compare(self, changes: Changes) -> None:
        """Note what is different now."""
        now = contents_of(self.thing, TraversalLimit())
        before, after = dict(self.before.parts), dict(now.parts if now is not None else self.before.parts)
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key, _MISSING), after.get(key, _MISSING)
            if old is new or (isinstance(old, PLAIN) and exact_key(old) == exact_key(new)):
                continue
            if self.kind == "numbers" and old == new:
                continue
            self.note(changes, key, old, new)

    def note(self, changes: Changes, key: Any, old: Any, new: Any) -> None:
        """Judge one difference."""
        name = f"{self.name}.{key}".lstrip(".")
        if self.kind == "items":
            name = f"{self.name}[{key!r}]"
        elif self.kind == "numbers":
            name = self.name
        private = any(part.startswith("_") for part in name.split("."))
        grows = self.kind == "items" and not private and not _has_tensor(old, new)
        if isinstance(old, _COUNTS) or self.kind in ("registry", "numbers") or grows:
            changes.state.append(name)
        elif self.kind != "fields" and not private:
            # A field that was None is a default, filled in at the first call and again at the next.
            changes.kept.append(name)


def _has_tensor(*values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _containers(module: nn.Module) -> Iterator[_Container]:
    limit = TraversalLimit()
    for prefix, submodule in module.named_modules():
        attributes = submodule.__dict__
        yield from _container(prefix, attributes, "attributes")
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            yield from _container(prefix, attributes[registry], "registry")
        for registry in REGISTRIES:
            if registry.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                # Put back and not spoken of: transformers installs its own at the first call.
                yield from _container("_", attributes[registry], "fields")
        own = [(f"{prefix}.{k}".lstrip("."), v) for k, v in attributes.items() if k not in REGISTRIES]
        yield from _nested(own, DEEPEST, limit)


def _container(name: str, thing: Any, kind: str) -> Iterator[_Container]:
    before = contents_of(thing, TraversalLimit())  # a scripted module's registries cannot be looked into
    if before is not None:
        yield _Container(name, thing, kind, before)


def _nested(named: Iterable[tuple[str, Any]], levels: int, limit: TraversalLimit) -> Iterator[_Container]:
    """What can be looked into among these values, and in what is in them."""
    for name, value in named:
        found = contents_of(value, limit) if limit.enter(value) else None
        if found is None:
            continue
        yield _Container(name, value, found.kind, found)
        if levels > 1:
            pattern = "{}[{!r}]" if found.kind == "items" else "{}.{}"
            inner = [(pattern.format(name, key), part) for key, part in found.parts]
            yield from _nested(inner, levels - 1, limit)
