"""Add random switches to a graph, for tests."""

import random

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op, Role


def with_random_switches(graph: Graph, seed: int, most: int = 4) -> Graph:
    """The same step with up to `most` switches of two families, and perhaps two on one op.

    ``fused``: an op runs nothing, and all that read its results read its inputs instead and take its time.
    ``other``: an op takes another time and another workspace, and may overwrite nothing.
    """
    rng = random.Random(seed)
    ops = list(graph.ops)
    for i in rng.sample(range(len(ops)), len(ops)):
        if len({a.switch for op in ops for a in op.alternatives}) >= most:
            break
        if rng.random() < 0.5 and (readers := _fusible(graph, i)):
            switch, gone = f"fused.{i}", ops[i].first
            _add(ops, i, Implementation(inputs=(), outputs=()), switch)
            for reader in readers:
                _add(ops, reader, _fused(ops[reader].first, gone, rng), switch)
        elif _plain(graph, ops[i]):
            run = attrs.evolve(
                ops[i].first,
                time_s=rng.randint(0, 32) / 8,
                workspace_nbytes=rng.choice((0, 64, 2000)),
                reuses=(),
            )
            _add(ops, i, run, f"other.{i}")
    return attrs.evolve(graph, ops=ops)


def _plain(graph: Graph, op: Op) -> bool:
    """Whether an op repeats as it first runs, and neither reads nor writes versions of a caller's tensor."""
    versions = {v for v, value in enumerate(graph.values) if value.replaces is not None}
    versions |= {value.replaces for value in graph.values if value.replaces is not None}
    touched = {*op.first.inputs, *op.first.outputs}
    return len(op.implementations) == 1 and op.rerun == 0 and versions.isdisjoint(touched)


def _fusible(graph: Graph, op: int) -> list[int]:
    """The readers of an op that may be left out; none if it may not."""
    made = set(graph.ops[op].first.outputs)
    if not _plain(graph, graph.ops[op]) or any(
        graph.values[v].role is not Role.ACTIVATION or graph.values[v].external for v in made
    ):
        return []
    reading = {
        i
        for i, other in enumerate(graph.ops)
        if any(made.intersection(run.inputs) for run in other.implementations)
    }
    tangents = set(graph.tangents)
    fits = all(_plain(graph, graph.ops[i]) for i in reading) and tangents.isdisjoint(
        graph.ops[op].first.inputs
    )
    return sorted(reading) if fits else []


def _fused(run: Implementation, gone: Implementation, rng: random.Random) -> Implementation:
    inputs = dict.fromkeys((*(v for v in run.inputs if v not in gone.outputs), *gone.inputs))
    return Implementation(
        inputs=inputs,
        outputs=run.outputs,
        time_s=run.time_s + gone.time_s,
        workspace_nbytes=run.workspace_nbytes + rng.choice((0, 64)),
        reuses=[(made, source) for made, source in run.reuses if source in inputs],
    )


def _add(ops: list[Op], i: int, run: Implementation, switch: str) -> None:
    number = len(ops[i].implementations)
    other = Alternative(switch=switch, first=number, again=number)
    ops[i] = attrs.evolve(
        ops[i],
        implementations=(*ops[i].implementations, run),
        alternatives=(*ops[i].alternatives, other),
    )
