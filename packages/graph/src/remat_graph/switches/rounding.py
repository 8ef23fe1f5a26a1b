"""Alternatives that round differently than the original: which ops run by one, and the graph without them."""

import attrs

from remat_graph.ir import Graph, Op
from remat_graph.schedule import Compute, Schedule
from remat_graph.switches.specialize import family_of


def without_rounding(graph: Graph) -> Graph:
    """The graph without the alternatives whose results may differ from the first implementation's.

    Implementations and values at the end that only those have are left out too: if all of them were added
    last, this is the graph without the families that have them. A graph that has none is returned itself.
    """
    if all(other.exact for op in graph.ops for other in op.alternatives):
        return graph
    ops = tuple(_exact(op) for op in graph.ops)
    made = {v for op in ops for run in op.implementations for v in run.outputs}
    mentioned = {v for op in graph.ops for run in op.implementations for v in run.outputs}
    values = list(graph.values)
    while len(values) - 1 in mentioned - made:
        values.pop()
    return attrs.evolve(graph, values=tuple(values), ops=ops)


def _exact(op: Op) -> Op:
    if all(other.exact for other in op.alternatives):
        return op
    kept = tuple(other for other in op.alternatives if other.exact)
    needed = {0, op.rerun, *(n for other in kept for n in (other.first, other.again))}
    dropped = {n for other in op.alternatives for n in (other.first, other.again)} - needed
    runs = list(op.implementations)
    while len(runs) - 1 in dropped:
        runs.pop()
    return attrs.evolve(op, implementations=tuple(runs), alternatives=kept)


def rounding_runs(graph: Graph, schedule: Schedule) -> tuple[tuple[str, str], ...]:
    """The ops that a schedule runs in a way that may round differently, and the family of the way.

    A way that repeats an op by another implementation than its first run has the original run first.
    """
    runs = set(schedule.computes())
    found: list[tuple[str, str]] = []
    for i, op in enumerate(graph.ops):
        for other in op.alternatives:
            number = other.first if other.again is None else other.again
            if not other.exact and Compute(i, number) in runs and op.implementations[number].outputs:
                found.append((op.name, family_of(other.switch)))
    return tuple(found)
