"""What a schedule recomputes and keeps, layer by layer; blocks that repeat are one group."""

from collections import Counter, defaultdict

import attrs

from remat_graph.ir import Graph
from remat_graph.layers.names import Patterns
from remat_graph.schedule import Compute, Free, Schedule

_size = [attrs.validators.instance_of(int), attrs.validators.ge(0)]


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers with one pattern, and what a schedule does in them.

    Attributes:
        layers: the pattern, such as ``transformer.h.*.mlp``; "" for ops outside of every submodule.
        of: number of these layers.
        recomputed: number of those in which an op runs more than once.
        repeats: number of repeated runs.
        repeats_s: seconds of them.
        unplanned_nbytes: what their ops made and the unplanned step holds when the backward begins.
        planned_nbytes: the same for the schedule.
    """

    layers: str
    of: int = attrs.field(validator=_size)
    recomputed: int = attrs.field(validator=_size)
    repeats: int = attrs.field(validator=_size)
    repeats_s: float
    unplanned_nbytes: int = attrs.field(validator=_size)
    planned_nbytes: int = attrs.field(validator=_size)


def layer_groups(graph: Graph, schedule: Schedule, unplanned: Schedule) -> tuple[LayerGroup, ...]:
    """The groups of a graph whose ops know their layers, those with the most repeated seconds first.

    Args:
        graph: the graph.
        schedule: a valid schedule.
        unplanned: the schedule of the unplanned step.

    Returns:
        Nothing if no op has a layer.
    """
    if not any(op.layer for op in graph.ops):
        return ()
    pattern_of = Patterns({op.layer for op in graph.ops})
    layer_of = [pattern_of.layer(op.layer) for op in graph.ops]
    repeats: Counter[str] = Counter()
    repeats_s: defaultdict[str, float] = defaultdict(float)
    seen: set[int] = set()
    for run in schedule.computes():
        if run.op in seen:
            repeats[layer_of[run.op]] += 1
            repeats_s[layer_of[run.op]] += graph.ops[run.op].implementations[run.implementation].time_s
        seen.add(run.op)
    held = [_held_nbytes(graph, each, layer_of) for each in (unplanned, schedule)]
    members: defaultdict[str, list[str]] = defaultdict(list)
    for layer in dict.fromkeys(layer_of):
        members[pattern_of(layer)].append(layer)
    groups = [
        LayerGroup(
            layers=pattern,
            of=len(layers),
            recomputed=sum(layer in repeats for layer in layers),
            repeats=sum(repeats[layer] for layer in layers),
            repeats_s=sum(repeats_s[layer] for layer in layers),
            unplanned_nbytes=sum(held[0][layer] for layer in layers),
            planned_nbytes=sum(held[1][layer] for layer in layers),
        )
        for pattern, layers in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.repeats_s, -group.repeats)))


def _held_nbytes(graph: Graph, schedule: Schedule, layer_of: list[str]) -> Counter[str]:
    """For each layer the bytes that its ops made and that are live at the boundary."""
    maker: dict[int, int] = {}
    for step in schedule.steps[: schedule.boundary]:
        match step:
            case Compute(op, implementation):
                maker |= dict.fromkeys(graph.ops[op].implementations[implementation].outputs, op)
            case Free(value):
                maker.pop(value, None)
    held: Counter[str] = Counter()
    for value, op in maker.items():
        held[layer_of[op]] += graph.allocated_nbytes(value)
    return held
