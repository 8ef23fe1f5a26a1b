"""What a forward sets on its module, which no graph captures.

It would be lost, since the graph runs and the Python code does not: capture puts it back, refuses what counts
or accumulates, and says what is only kept to be seen. What a forward reads is guarded, see
`remat_executor.settings`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from remat_executor.settings import PLAIN

_COUNTS = (bool, int, float, complex, str)


def _is_settings(value: Any) -> bool:
    """Whether an attribute is an object that holds settings, such as a config."""
    if isinstance(value, (Tensor, nn.Module, dict, list, tuple, *PLAIN)) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


@contextlib.contextmanager
def kept_attributes(module: nn.Module) -> Iterator[tuple[list[str], list[str]]]:
    """Put back what a forward sets on its submodules.

    The lists are filled at the end: names of state that the forward changed (numbers, text, contents of lists
    and dicts), and names of what it merely keeps, such as its last hidden tensor.
    """
    before = [(name, submodule, dict(submodule.__dict__)) for name, submodule in module.named_modules()]
    contents = [
        (f"{name}.{key}" if name else key, value, _copy(value))
        for name, _, attributes in before
        for key, value in attributes.items()
        if isinstance(value, dict | list)
    ]
    objects = {
        id(value): (f"{name}.{key}" if name else key, value, dict(value.__dict__))
        for name, _, attributes in before
        for key, value in attributes.items()
        if _is_settings(value)
    }
    state: list[str] = []
    kept: list[str] = []
    try:
        yield state, kept
    finally:
        for name, submodule, attributes in before:
            found = submodule.__dict__
            for key in sorted(found.keys() | attributes.keys()):
                if not key.startswith("_") and not _same(found, attributes, key):
                    counts = isinstance(attributes.get(key), _COUNTS)
                    (state if counts else kept).append(f"{name}.{key}" if name else key)
            _restore(found, attributes)
        for name, thing, fields in objects.values():
            # What was None is a default filled in at the first call, and filled in again at the next.
            changed = (k for k, v in fields.items() if isinstance(v, _COUNTS) and thing.__dict__.get(k) != v)
            state.extend(f"{name}.{k}" for k in changed)
            _restore(thing.__dict__, fields)
        for name, value, content in contents:
            if not name.rpartition(".")[2].startswith("_") and len(value) != len(content):
                items = value.values() if isinstance(value, dict) else value
                (kept if any(isinstance(item, Tensor) for item in items) else state).append(name)
            if isinstance(value, list):
                value[:] = content
            elif isinstance(content, dict):
                _restore(value, content)


def _copy(value: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    return list(value) if isinstance(value, list) else dict(value)


def _restore(mapping: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    if mapping.keys() != content.keys() or any(mapping[k] is not content[k] for k in content):
        mapping.clear()
        mapping.update(content)


def _same(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return key in one and key in other and one[key] is other[key]
