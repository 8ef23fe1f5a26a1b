"""Detect and undo what a forward assigns on its module: a captured graph does not replay such assignments.

Capture restores every attribute. It refuses changes that a later call would read, such as a counter, and
warns of assigned values that a user may look at. The attributes that a forward reads are guarded by
`remat_executor.inspection.attribute_keys`, with the same traversal.
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
    """Names of what a forward changed.

    Attributes:
        state: numbers, strings and items of containers, which a later call would read.
        kept: values stored for inspection only, such as the last hidden tensor.
        defaults: (fields of an object, name, value) of plain values in place of None. Every call fills them
            in, as transformers' classifiers do with `config.problem_type`.
    """

    state: list[str] = attrs.field(factory=list)
    kept: list[str] = attrs.field(factory=list)
    defaults: list[tuple[dict[str, Any], str, Any]] = attrs.field(factory=list)

    def fill_defaults(self) -> None:
        """Fill the defaults in, as the original's first call does, unless that is done."""
        for fields, name, value in self.defaults:
            if fields.get(name, value) is None:
                fields[name] = value

    @context
    def filled(self) -> Generator[None, None, None]:
        """A context in which the defaults are filled in."""
        before = [(fields, name, fields[name]) for fields, name, _ in self.defaults if name in fields]
        try:
            self.fill_defaults()
            yield
        finally:
            for fields, name, value in before:
                fields[name] = value


@context
def restored_attributes(module: nn.Module) -> Generator[Changes, None, None]:
    """Restore at the end what a forward changed in its submodules and their objects; report it."""
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
    """Something that a forward can change, and its contents before."""

    name: str  # its name for messages; empty for the module itself
    thing: Any  # the module's dict, or an object that the module holds
    kind: str  # "attributes" or "registry" of a submodule, else as in `Contents`
    before: Contents  # the contents before the forward

    def compare(self, changes: Changes) -> None:
        """Add what is different now to `changes`."""
        now = contents_of(self.thing, TraversalLimit())
        before, after = dict(self.before.parts), dict(now.parts if now is not None else self.before.parts)
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key, _MISSING), after.get(key, _MISSING)
            if old is new or (isinstance(old, PLAIN) and exact_key(old) == exact_key(new)):
                continue
            if self.kind == "numbers" and old == new:
                continue
            fields = getattr(self.thing, "__dict__", None) if self.kind == "fields" else None
            if old is None and isinstance(new, PLAIN) and type(fields) is dict and key in fields:
                changes.defaults.append((fields, key, new))
            self.note(changes, key, old, new)

    def note(self, changes: Changes, key: Any, old: Any, new: Any) -> None:
        """Classify one difference."""
        name = f"{self.name}.{key}".lstrip(".")
        if self.kind == "items":
            name = f"{self.name}[{key!r}]"
        elif self.kind == "numbers":
            name = self.name
        private = any(part.startswith("_") for part in name.split("."))
        grows = self.kind == "items" and not private and not isinstance(old, Tensor)
        grows = grows and not isinstance(new, Tensor)
        if isinstance(old, _COUNTS) or self.kind in ("registry", "numbers") or grows:
            changes.state.append(name)
        elif self.kind != "fields" and not private:
            # A field of an object that was None is a default, which every call fills in.
            changes.kept.append(name)


def _containers(module: nn.Module) -> Iterator[_Container]:
    limit = TraversalLimit()
    for prefix, submodule in module.named_modules():
        attributes = submodule.__dict__
        yield from _container(prefix, attributes, "attributes")
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            yield from _container(prefix, attributes[registry], "registry")
        for registry in REGISTRIES:
            if registry.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                # Restored without a report: transformers installs its own hooks at the first call.
                yield from _container("_", attributes[registry], "fields")
        own = [(f"{prefix}.{k}".lstrip("."), v) for k, v in attributes.items() if k not in REGISTRIES]
        yield from _nested(own, DEEPEST, limit)


def _container(name: str, thing: Any, kind: str) -> Iterator[_Container]:
    before = contents_of(thing, TraversalLimit())  # a scripted module's registries cannot be read
    if before is not None:
        yield _Container(name, thing, kind, before)


def _nested(named: Iterable[tuple[str, Any]], levels: int, limit: TraversalLimit) -> Iterator[_Container]:
    """The objects among these values that can be read, and those inside them."""
    for name, value in named:
        found = contents_of(value, limit) if limit.enter(value, levels) else None
        if found is None:
            continue
        yield _Container(name, value, found.kind, found)
        if levels > 1:
            pattern = "{}[{!r}]" if found.kind == "items" else "{}.{}"
            inner = [(pattern.format(name, key), part) for key, part in found.parts]
            yield from _nested(inner, levels - 1, limit)
