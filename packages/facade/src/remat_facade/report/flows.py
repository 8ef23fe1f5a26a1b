"""What the backward gets from each layer of the forward: kept, recomputed or moved, as data for a picture."""

from collections import defaultdict

import attrs

from remat_facade.report.held import grouping
from remat_graph import Compute, Free, Graph, Lane, Plan, Schedule, Start
from remat_graph.layers.names import Patterns

MOST_ROWS = 13
"""Groups that are shown by themselves; others are one row."""


@attrs.define
class LayerFlow:
    """A group of layers with one pattern, and the bytes of its values.

    A value counts once: as moved, else as kept, else as recomputed.

    Attributes:
        layers: the pattern; kinds of ops if the graph knows no layers.
        of: number of these layers; 0 if the graph knows none.
        kept_nbytes: values that the device holds from the forward into the backward.
        recomputed_nbytes: values that the backward recomputes, those on the way to others included.
        moved_nbytes: values that are swapped in from the host, activations and parameters.
        repeats_s: seconds of its repeats.
        onward_nbytes: values that pass in the forward between this row or those above and those below.
    """

    layers: str
    of: int = 0
    kept_nbytes: int = 0
    recomputed_nbytes: int = 0
    moved_nbytes: int = 0
    repeats_s: float = 0.0
    onward_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kept_nbytes + self.recomputed_nbytes + self.moved_nbytes


@attrs.define
class _Uses:
    """Where the values of a schedule are made and read."""

    maker: dict[int, str] = attrs.field(factory=dict)  # group by value, of the first run that makes it
    readers: defaultdict[int, set[str]] = attrs.field(factory=lambda: defaultdict(set))  # in the forward
    kept: set[int] = attrs.field(factory=set)
    recomputed: set[int] = attrs.field(factory=set)
    moved: set[int] = attrs.field(factory=set)
    repeats_s: defaultdict[str, float] = attrs.field(factory=lambda: defaultdict(float))


def layer_flows(graph: Graph, plan: Plan) -> tuple[LayerFlow, ...]:
    """The groups of the forward in the order in which they first run; the smallest of many are one.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
    """
    uses = _uses(graph, plan.schedule)
    group = grouping(graph)
    names = list(dict.fromkeys(group(op) for op in graph.ops if not op.backward))
    layers: defaultdict[str, set[str]] = defaultdict(set)
    layer_of = Patterns({op.layer for op in graph.ops}).layer
    for op in graph.ops:
        if op.layer and not op.backward:
            layers[group(op)].add(layer_of(op.layer))
    rows = {name: LayerFlow(name, len(layers[name]), repeats_s=uses.repeats_s[name]) for name in names}
    for v in uses.maker.keys() | uses.moved:
        place = uses.maker.get(v) or min(uses.readers[v], default="", key=names.index)
        if place in rows:
            row, nbytes = rows[place], graph.allocated_nbytes(v)
            row.moved_nbytes += nbytes if v in uses.moved else 0
            row.kept_nbytes += nbytes if v in uses.kept - uses.moved else 0
            row.recomputed_nbytes += nbytes if v in uses.recomputed - uses.kept - uses.moved else 0
    shown = sorted(names, key=lambda name: -rows[name].nbytes)[:MOST_ROWS]
    found = [rows[name] for name in names if name in shown]
    index = {row.layers: number for number, row in enumerate(found)}
    for v, maker in uses.maker.items():
        places = [index[name] for name in {maker, *uses.readers[v]} if name in index]
        for number in range(min(places, default=0), max(places, default=0)):
            found[number].onward_nbytes += graph.allocated_nbytes(v)
    rest = [rows[name] for name in names if name not in shown]
    return (*found, _summed(rest)) if rest else tuple(found)


def _uses(graph: Graph, schedule: Schedule) -> _Uses:
    group, uses = grouping(graph), _Uses()
    live: set[int] = set()
    ran: set[int] = set()
    for position, step in enumerate(schedule.steps):
        if position == schedule.boundary:
            uses.kept = live & uses.maker.keys()
        match step:
            case Compute(number, implementation):
                op = graph.ops[number]
                run = op.implementations[implementation]
                made = [v for v in run.outputs if not graph.values[v].external]
                if number in ran:
                    uses.repeats_s[group(op)] += run.time_s
                    uses.recomputed.update(made if position >= schedule.boundary else ())
                elif not op.backward:
                    uses.maker |= dict.fromkeys(made, group(op))
                    for v in run.inputs:
                        uses.readers[v].add(group(op))
                ran.add(number)
                live.update(made)
            case Free(value):
                live.discard(value)
            case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
                uses.moved.add(transfer.value)
                live.add(transfer.value)
    if schedule.boundary >= len(schedule.steps):
        uses.kept = live & uses.maker.keys()
    return uses


def _summed(rows: list[LayerFlow]) -> LayerFlow:
    return LayerFlow(
        layers=f"{len(rows)} more",
        kept_nbytes=sum(row.kept_nbytes for row in rows),
        recomputed_nbytes=sum(row.recomputed_nbytes for row in rows),
        moved_nbytes=sum(row.moved_nbytes for row in rows),
        repeats_s=sum(row.repeats_s for row in rows),
    )
