"""Where a schedule runs ops that may round differently than the original's, layer by layer."""

from collections import defaultdict
from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph, Op
from remat_graph.layers.names import Patterns

_count = [attrs.validators.instance_of(int), attrs.validators.ge(0)]


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str, names))


@attrs.frozen(kw_only=True)
class RoundingGroup:
    """Ops of layers with one pattern that run in ways of one family.

    Attributes:
        family: the family.
        layers: the pattern, such as ``transformer.h.*.mlp``; "" for ops outside of every submodule.
        ops: number of the ops.
        targets: what they call, without repeats.
    """

    family: str
    layers: str
    ops: int = attrs.field(validator=_count)
    targets: tuple[str, ...] = attrs.field(converter=_names)


def rounding_groups(graph: Graph, runs: Iterable[tuple[str, str]]) -> tuple[RoundingGroup, ...]:
    """The groups of ops that round, in the order of the step.

    Args:
        graph: the graph.
        runs: names of the ops, with the families of their ways; see `rounding_runs`.

    Returns:
        Nothing if no op of the graph has a layer.
    """
    layers = {op.layer for op in graph.ops}
    if not any(layers):
        return ()
    pattern_of = Patterns(layers)
    named = {op.name: op for op in graph.ops}
    found: defaultdict[tuple[str, str], list[Op]] = defaultdict(list)
    for name, family in runs:
        found[family, pattern_of(named[name].layer)].append(named[name])
    return tuple(
        RoundingGroup(
            family=family,
            layers=pattern,
            ops=len(ops),
            targets=tuple(dict.fromkeys(op.target for op in ops)),
        )
        for (family, pattern), ops in found.items()
    )
