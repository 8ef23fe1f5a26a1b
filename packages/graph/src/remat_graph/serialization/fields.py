"""Definitions that the file formats of graphs, schedules, plans and platforms share."""

import os
from typing import Any

import attrs

from remat_graph.ir import Alternative, Implementation, Op, Update, Value
from remat_graph.links import Links
from remat_graph.serialization.json_reader import Reader

VERSION = 1

AnyPath = str | os.PathLike[str]

ANY = 2**63  # number of items where no graph is given: an index need only be at least 0

_KEYS = {"placement": "home"}  # fields with another name in version 1 of the format


def keys_of(cls: type[Any]) -> frozenset[str]:
    """Keys of the JSON object of an attrs class: the names of its fields, except for `_KEYS`."""
    return frozenset(_KEYS.get(field.name, field.name) for field in attrs.fields(cls))


def sparse(thing: Value | Op | Implementation | Alternative | Update) -> dict[str, Any]:
    """The fields that differ from their defaults, without nested implementations and alternatives."""
    data: dict[str, Any] = {}
    for field in attrs.fields(type(thing)):
        content = getattr(thing, field.name)
        if field.name not in ("implementations", "alternatives") and content != field.default:
            data[_KEYS.get(field.name, field.name)] = plain(content)
    return data


def plain(content: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    return [plain(item) for item in content] if isinstance(content, tuple) else content


def links_to_data(links: Links) -> dict[str, float]:
    """Bandwidths and times as JSON data; those that are None or 0 are left out."""
    return {name: rate for name, rate in attrs.asdict(links).items() if rate}


def read_links(reader: Reader) -> Links:
    """Read the data of `links_to_data`."""
    reader.known(keys_of(Links))
    try:
        given = ((name, reader.get(name)) for name in reader.mapping())
        return Links(**{name: each.seconds() if name == "start_s" else each.rate() for name, each in given})
    except ValueError:
        reader.fail(
            "a bandwidth is above 1e18 bytes per second or start_s above 1e6; leave out what is unknown"
        )
