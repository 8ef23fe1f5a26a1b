"""The Python side of a module: attributes that a forward reads or sets, which no graph captures.

What it reads is guarded: a changed dropout rate is another step. What it sets would be lost (the graph runs,
the Python code does not), so capture puts it back and says so.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types that are compared by value."""


def settings(module: nn.Module) -> tuple[Any, ...]:
    """Per submodule its attributes of plain types, and tuples of those: rates, flags, sizes; hashable."""
    return tuple(
        tuple((key, value) for key, value in submodule.__dict__.items() if _is_plain(value))
        for submodule in module.modules()
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(isinstance(v, PLAIN) for v in value))


@contextlib.contextmanager
def kept_attributes(module: nn.Module) -> Iterator[list[str]]:
    """Put back what a forward sets on its submodules; the list names what it set, filled at the end."""
    before = [(name, submodule, dict(submodule.__dict__)) for name, submodule in module.named_modules()]
    contents = [
        (value, list(value) if isinstance(value, list) else dict(value))
        for _, _, attributes in before
        for value in attributes.values()
        if isinstance(value, dict | list)
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, submodule, attributes in before:
            found = submodule.__dict__
            different = [k for k in found.keys() | attributes.keys() if not _same(found, attributes, k)]
            changed += [f"{name}.{k}" if name else k for k in sorted(different) if not k.startswith("_")]
            _restore(found, attributes)
        for value, content in contents:
            if isinstance(value, list):
                value[:] = content
            elif isinstance(content, dict):
                _restore(value, content)


def _restore(mapping: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    if mapping.keys() != content.keys() or any(mapping[k] is not content[k] for k in content):
        mapping.clear()
        mapping.update(content)


def _same(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return key in one and key in other and one[key] is other[key]
