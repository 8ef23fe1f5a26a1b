"""Relax a graph with switches: what bounds the relaxed graph bounds every decision."""

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op


def relaxed(graph: Graph) -> Graph:
    """A graph without switches in which every decision's schedule is possible, as fast and as small.

    Each op reads what it reads in all of its ways, makes what it makes in all of them, takes the least time
    and workspace, and may overwrite what any of them may.
    """
    return attrs.evolve(graph, ops=tuple(_relaxed(op) for op in graph.ops))


def _relaxed(op: Op) -> Op:
    if not op.alternatives:
        return op
    base = Alternative(switch="", first=0, again=op.rerun)
    ways = (base, *op.alternatives)
    first = _common([op.implementations[way.first] for way in ways])
    repeats = [op.implementations[way.again] for way in ways if way.again is not None]
    runs = (first, _common(repeats)) if repeats else (first,)
    return attrs.evolve(op, implementations=runs, rerun=len(runs) - 1 if repeats else None, alternatives=())


def _common(ways: list[Implementation]) -> Implementation:
    inputs = set.intersection(*(set(way.inputs) for way in ways))
    outputs = set.intersection(*(set(way.outputs) for way in ways))
    reuses = dict.fromkeys(pair for way in ways for pair in way.reuses)
    return Implementation(
        inputs=[v for v in ways[0].inputs if v in inputs],
        outputs=[v for v in ways[0].outputs if v in outputs],
        time_s=min(way.time_s for way in ways),
        issue_s=min(way.issue_s for way in ways),
        workspace_nbytes=min(way.workspace_nbytes for way in ways),
        reuses=[(made, source) for made, source in reuses if made in outputs and source in inputs],
    )
