"""The step of a graph at other sizes: as another batch or length of the same model gives."""

import random

import attrs

from remat_graph.ir import Graph


def resized(graph: Graph, seed: int) -> Graph:
    """The same ops and values with other bytes and times; values that had equal bytes have equal bytes."""
    rng = random.Random(seed)
    sizes = sorted({value.nbytes for value in graph.values})
    factor = {nbytes: rng.uniform(0.5, 2.0) for nbytes in sizes}
    values = [
        attrs.evolve(value, nbytes=round(value.nbytes * factor[value.nbytes])) for value in graph.values
    ]
    ops = []
    for op in graph.ops:
        slower = rng.uniform(0.5, 2.0)
        ways = [
            attrs.evolve(each, time_s=each.time_s * slower, workspace_nbytes=2 * each.workspace_nbytes)
            for each in op.implementations
        ]
        ops.append(attrs.evolve(op, key=f"{op.key} resized", implementations=ways))
    return attrs.evolve(graph, values=values, ops=ops)
