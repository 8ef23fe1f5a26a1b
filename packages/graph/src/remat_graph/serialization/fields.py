"""What the formats of graphs, schedules and plans share."""

import os
from typing import Any

import attrs

from remat_graph.ir import Implementation, Op, Update, Value

VERSION = 1

AnyPath = str | os.PathLike[str]

ANY = 2**63  # no graph at hand: indices are only known not to be negative


_KEYS = {"placement": "home"}  # fields that version 1 of the format writes under another name


def keys_of(cls: type[Any]) -> frozenset[str]:
    """Keys of the JSON object of an attrs class: the names of its fields, but for `_KEYS`."""
    return frozenset(_KEYS.get(field.name, field.name) for field in attrs.fields(cls))


def sparse(thing: Value | Op | Implementation | Update) -> dict[str, Any]:
    """What differs from its default; nested implementations are the caller's."""
    data: dict[str, Any] = {}
    for field in attrs.fields(type(thing)):
        content = getattr(thing, field.name)
        if field.name != "implementations" and content != field.default:
            data[_KEYS.get(field.name, field.name)] = plain(content)
    return data


def plain(content: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    if isinstance(content, tuple):
        return [plain(item) for item in content]
    return content
