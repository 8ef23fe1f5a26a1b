"""Read and write what plans say about layers."""

from collections.abc import Mapping
from typing import Any

import attrs

from remat_graph.layers.recomputed import LayerGroup
from remat_graph.layers.rounding import RoundingGroup
from remat_graph.layers.ways import WayGroup
from remat_graph.serialization.json_reader import Reader


def group_to_data(group: LayerGroup | WayGroup | RoundingGroup) -> dict[str, Any]:
    """A group as JSON data."""
    fields = {field.name: getattr(group, field.name) for field in attrs.fields(type(group))}
    return {name: list(found) if isinstance(found, tuple) else found for name, found in fields.items()}


def read_layers(reader: Reader) -> tuple[LayerGroup, ...]:
    """The groups of layers of a plan."""
    return tuple(LayerGroup(**_read(item, LayerGroup)) for item in reader.items())


def read_ways(reader: Reader) -> tuple[WayGroup, ...]:
    """The groups of other ways of a plan."""
    return tuple(WayGroup(**_read(item, WayGroup)) for item in reader.items())


def read_rounding(reader: Reader) -> tuple[RoundingGroup, ...]:
    """The groups of ops of a plan that round."""
    return tuple(RoundingGroup(**_read(item, RoundingGroup)) for item in reader.items())


def _read(reader: Reader, kind: type[Any]) -> Mapping[str, Any]:
    reader.known(frozenset(field.name for field in attrs.fields(kind)))
    return {field.name: _READERS[field.type](reader.get(field.name)) for field in attrs.fields(kind)}


def _texts(reader: Reader) -> tuple[str, ...]:
    return tuple(item.text() for item in reader.items())


_READERS = {str: Reader.text, int: Reader.size, float: Reader.signed_seconds, tuple[str, ...]: _texts}
