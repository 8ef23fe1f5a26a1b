"""Relax a graph with switches: what bounds the relaxed graph bounds every decision."""

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op
from remat_graph.switches.specialize import runs_nothing


def relaxed(graph: Graph) -> Graph:
    """A graph without switches in which every decision's schedule is possible, as fast and as small.

    Each op reads what it reads in all of its ways, makes what it makes in all of them, takes the least time
    and workspace, and may overwrite what any of them may. A value that different ops make under different
    decisions has no bytes and is read by nothing.
    """
    ops = [_relaxed(op) for op in graph.ops]
    switched = {v for op in graph.ops if op.alternatives for v in _made(op)}
    moving = switched.difference(*(op.first.outputs for op in ops))
    ops = [_without(op, moving) for op in ops]
    values = list(graph.values)
    for value in sorted(moving):
        values[value] = attrs.evolve(values[value], nbytes=0)
        if values[value].pinned:
            maker = next(i for i, op in enumerate(graph.ops) if value in _made(op))
            runs = [attrs.evolve(r, outputs=(*r.outputs, value)) for r in ops[maker].implementations]
            ops[maker] = attrs.evolve(ops[maker], implementations=runs)
    kept = [
        op
        for op, before in zip(ops, graph.ops, strict=True)
        if not (before.alternatives and all(map(runs_nothing, op.implementations)))
    ]
    return attrs.evolve(graph, ops=kept, values=values)


def _made(op: Op) -> set[int]:
    return {v for run in op.implementations for v in run.outputs}


def _without(op: Op, values: set[int]) -> Op:
    """The op without reading or making these values."""
    if all(values.isdisjoint((*run.inputs, *run.outputs)) for run in op.implementations):
        return op
    runs = [
        attrs.evolve(
            run,
            inputs=[v for v in run.inputs if v not in values],
            outputs=[v for v in run.outputs if v not in values],
            reuses=[pair for pair in run.reuses if values.isdisjoint(pair)],
        )
        for run in op.implementations
    ]
    return attrs.evolve(op, implementations=runs)


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
