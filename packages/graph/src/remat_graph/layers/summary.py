"""What a plan does layer by layer, in a few lines for its summary."""

from collections.abc import Sequence

from remat_graph.layers.recomputed import LayerGroup
from remat_graph.layers.rounding import RoundingGroup
from remat_graph.layers.ways import WayGroup
from remat_graph.units import format_nbytes, in_brackets

OUTSIDE = "outside of submodules"
"""Name of the layer of ops that no submodule runs."""

_MOST = 3  # groups in a line


def recomputed_line(groups: Sequence[LayerGroup], base_s: float) -> list[str]:
    """The groups that recompute, the most expensive first; nothing if none does."""
    found = [group for group in groups if group.repeats]
    said = [
        f"{group.layers or OUTSIDE}{f': {group.recomputed} of {group.of}' if group.of > 1 else ''}"
        f"{_cost(group.repeats_s, base_s)}"
        for group in found[:_MOST]
    ]
    if rest := found[_MOST:]:
        said.append(f"{len(rest)} more{_cost(sum(group.repeats_s for group in rest), base_s)}")
    return ["recomputed in " + ", ".join(said)] if said else []


def ways_line(groups: Sequence[WayGroup], base_s: float) -> list[str]:
    """The groups of other ways to run ops, those that save most first; nothing if none is on."""
    said = [
        f"{group.family} ({group.on}){f' in {group.layers}' if group.layers else ''}"
        f"{_saves(group.saved_nbytes)}{_cost(group.extra_s, base_s)}"
        for group in groups[:_MOST]
    ]
    if rest := groups[_MOST:]:
        said.append(f"{sum(group.on for group in rest)} more{_cost(sum(g.extra_s for g in rest), base_s)}")
    return ["other ways to run ops: " + ", ".join(said)] if said else []


def rounding_lines(runs: Sequence[tuple[str, str]], groups: Sequence[RoundingGroup]) -> list[str]:
    """Per family, where its ops round differently; the names of the ops if the layers are unknown."""
    ops: dict[str, list[str]] = {}
    for op, family in runs:
        ops.setdefault(family, []).append(op)
    places: dict[str, list[str]] = {}
    for group in groups:
        place = f"in {group.layers}" if group.layers else OUTSIDE
        places.setdefault(group.family, []).append(f"{group.ops} {place}")
    return [
        f"not bit-identical, within rounding: {family} ({len(names)}): {', '.join(places.get(family, names))}"
        for family, names in ops.items()
    ]


def _saves(nbytes: int) -> str:
    """What a group saves, in words; nothing where only repeats run in another way."""
    if not nbytes:
        return ""
    return f" takes {format_nbytes(-nbytes)} more" if nbytes < 0 else f" saves {format_nbytes(nbytes)}"


def _cost(seconds: float, base_s: float) -> str:
    return in_brackets(seconds / base_s) if base_s else ""
