"""Relax a graph with switches: what bounds the relaxed graph bounds every decision."""

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op
from remat_graph.switches.specialize import runs_nothing


def relaxed(graph: Graph) -> Graph:
    """A graph without switches in which every decision's schedule is possible, as fast and as small.

    Each op reads what it reads in all of its ways, makes what it makes in all of them, takes the least
    workspace and the least time to repeat, and may overwrite what any of them may. First runs take together
    the base's time less what each switch saves as a whole.

    A value that different ops make under different decisions is made by the added op among them. This reads
    what all of them read; where it runs nothing, its run comes right before the op that makes the value
    there. If there is no such op, the value is read by nothing and has no bytes.
    """
    ops = [_relaxed(op) for op in graph.ops]
    switched = {v for op in graph.ops if op.alternatives for v in _made(op)}
    moving = switched.difference(*(op.first.outputs for op in ops))
    added = _made_by_added_ops(graph, moving)
    gone = moving.difference(*(run.outputs for run, _ in added.values()))
    ops = [_without(op, moving if i in added else gone) for i, op in enumerate(ops)]
    for i, (run, repeats) in added.items():
        run = attrs.evolve(run, inputs=[v for v in run.inputs if v not in gone])
        ops[i] = attrs.evolve(ops[i], implementations=[run], rerun=0 if repeats else None)
    values = list(graph.values)
    for value in sorted(gone):
        values[value] = attrs.evolve(values[value], nbytes=0)
        if values[value].pinned:
            maker = max(i for i, op in enumerate(graph.ops) if value in _made(op))
            runs = [attrs.evolve(r, outputs=(*r.outputs, value)) for r in ops[maker].implementations]
            ops[maker] = attrs.evolve(ops[maker], implementations=runs)
    times = _first_times_s(graph)
    ops = [_with_first_time(op, time_s) for op, time_s in zip(ops, times, strict=True)]
    kept = [
        op
        for op, before in zip(ops, graph.ops, strict=True)
        if not (before.alternatives and all(map(runs_nothing, op.implementations)))
    ]
    return attrs.evolve(graph, ops=kept, values=values)


def _made_by_added_ops(graph: Graph, moving: set[int]) -> dict[int, tuple[Implementation, bool]]:
    """Per added op a run that makes the moving values of one other op, and whether any of the two repeats.

    In a schedule with the switch off, the added op runs right before the other op: its inputs are live there,
    and its results are held while that runs. It does not read what the other overwrites, so that this stays
    possible.
    """
    makers: dict[int, set[int]] = {v: set() for v in moving}
    for i, op in enumerate(graph.ops):
        for v in moving.intersection(_made(op)):
            makers[v].add(i)
    found: dict[int, tuple[Implementation, bool]] = {}
    for i in sorted({max(each) for each in makers.values()}):
        mine = [v for v in moving if i in makers[v] and len(makers[v]) > 1]
        sources = set().union(*(makers[v] for v in mine))
        runs = [run for n in sources for run in graph.ops[n].implementations if not runs_nothing(run)]
        making = [run for run in runs if not set(mine).isdisjoint(run.outputs)]
        own = [run for run in graph.ops[i].implementations if not runs_nothing(run)]
        if (
            not mine
            or not runs_nothing(graph.ops[i].first)
            or any(set(mine) - set(run.outputs) for run in (*own, *making))
            or any(v in mine for run in making for v, _ in run.reuses)
            or any(graph.values[v].external for v in mine)
            or len({graph.ops[n].backward for n in sources}) > 1
            or any(makers[v] != makers[mine[0]] for v in mine)
        ):
            continue
        overwritten = {source for run in runs for _, source in run.reuses}
        inputs = set.intersection(*(set(run.inputs) for run in making)) - overwritten
        repeats = any(_repeats(graph.ops[n]) for n in sources)
        found[i] = Implementation(inputs=sorted(inputs), outputs=sorted(mine)), repeats
    return found


def _repeats(op: Op) -> bool:
    return op.rerun is not None or any(other.again is not None for other in op.alternatives)


def _first_times_s(graph: Graph) -> list[float]:
    """Seconds of each first run whose sum is at most that of any decision.

    A decision takes the base's time and what each of its switches adds. What a switch saves is taken from its
    ops; if they have less left, because other switches of theirs have saved it, they take no time at all.
    """
    times = [op.first.time_s for op in graph.ops]
    changed: dict[str, list[int]] = {}
    added_s: dict[str, float] = {}
    for i, op in enumerate(graph.ops):
        for other in op.alternatives:
            changed.setdefault(other.switch, []).append(i)
            extra_s = op.implementations[other.first].time_s - op.first.time_s
            added_s[other.switch] = added_s.get(other.switch, 0.0) + extra_s
    for switch, ops in changed.items():
        saved_s = max(0.0, -added_s[switch])
        for i in ops:
            part_s = min(times[i], saved_s)
            times[i] -= part_s
            saved_s -= part_s
    return times


def _with_first_time(op: Op, time_s: float) -> Op:
    if op.first.time_s == time_s:
        return op
    return attrs.evolve(op, implementations=[attrs.evolve(op.first, time_s=time_s), *op.implementations[1:]])


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
