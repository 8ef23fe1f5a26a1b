"""Dependencies between the ops of a graph as bit sets (Python ints), the basis of both bounds."""

import attrs

from remat_graph import Graph, Placement


@attrs.frozen(kw_only=True)
class Reachability:
    """Dependencies of first runs."""

    ancestors: list[int]  # per op, the ops that must have run before its first run
    descendants: list[int]  # per op, the ops that cannot have run before it
    # values with bytes that cannot be freed at will (pinned, tangents, or impossible to recompute), each with
    # the ops whose first run reads it
    sticky: dict[int, int]
    # per op, whether it comes after one that reads a tangent, so that every forward op has run before it
    after_boundary: list[bool]
    free: list[bool]  # per value, whether it costs nothing and is always live
    recomputable: set[int]  # values that a repeat of their producer computes
    tangent_set: set[int]  # indices of the tangents
    base_nbytes: int  # bytes of persistent values on the device


def reachability(graph: Graph) -> Reachability:
    """Compute the dependencies; O(ops * edges / 64).

    An op that overwrites a buffer's or a generator's state comes after all that read the state before.
    """
    count = len(graph.ops)
    free = [value.external or value.placement is not None for value in graph.values]
    tangents = {v for v in graph.tangents if not free[v]}
    reading: list[list[int]] = [[] for _ in graph.values]
    overwriter = overwriters(graph)
    replaced: list[list[int]] = [[] for _ in graph.ops]
    for v, i in overwriter.items():
        replaced[i].append(v)
    ancestors, after_boundary = [0] * count, [False] * count
    for i, op in enumerate(graph.ops):
        for v in op.first.inputs:
            reading[v].append(i)
            maker = graph.producer[v]
            if v in tangents:  # external tangents may be read at any time
                after_boundary[i] = True
            elif maker is not None and maker != i:
                ancestors[i] |= ancestors[maker] | 1 << maker
                after_boundary[i] = after_boundary[i] or after_boundary[maker]
        for reader in {reader for v in replaced[i] for reader in reading[v]} - {i}:
            ancestors[i] |= ancestors[reader] | 1 << reader
            after_boundary[i] = after_boundary[i] or after_boundary[reader]
    descendants = [0] * count
    for i in range(count - 1, -1, -1):
        for v in graph.ops[i].first.outputs:
            for reader in reading[v]:
                descendants[i] |= descendants[reader] | 1 << reader
        for writer in {overwriter[v] for v in graph.ops[i].first.inputs if v in overwriter} - {i}:
            descendants[i] |= descendants[writer] | 1 << writer
    recomputable = {
        v
        for op in graph.ops
        if op.rerun is not None
        for v in op.implementations[op.rerun].outputs
        if not free[v]
    }
    sticky = {
        v: sum(1 << i for i in reading[v])
        for v, value in enumerate(graph.values)
        if not free[v] and graph.allocated_nbytes(v) > 0 and (value.pinned or v not in recomputable)
    }
    return Reachability(
        ancestors=ancestors,
        descendants=descendants,
        sticky=sticky,
        after_boundary=after_boundary,
        free=free,
        recomputable=recomputable,
        tangent_set=tangents,
        base_nbytes=sum(
            graph.allocated_nbytes(i)
            for i, value in enumerate(graph.values)
            if value.placement is Placement.DEVICE
        ),
    )


def overwriters(graph: Graph) -> dict[int, int]:
    """Per value that is the state of a buffer or a generator the op that overwrites it."""
    return {
        old: i
        for i, op in enumerate(graph.ops)
        for v in op.first.outputs
        if (old := graph.values[v].replaces) is not None
    }


def with_order(reach: Reachability, first: int, then: int) -> Reachability:
    """The dependencies of the schedules in which op `first` first runs before op `then`."""
    ancestors, descendants = list(reach.ancestors), list(reach.descendants)
    after_boundary = list(reach.after_boundary)
    before, after = ancestors[first] | 1 << first, descendants[then] | 1 << then
    for i in members(after):
        ancestors[i] |= before
        after_boundary[i] |= after_boundary[first]
    for i in members(before):
        descendants[i] |= after
    return attrs.evolve(reach, ancestors=ancestors, descendants=descendants, after_boundary=after_boundary)


def members(mask: int) -> list[int]:
    """The indices in a bit set, in order."""
    return [i for i, bit in enumerate(bin(mask)[:1:-1]) if bit == "1"]
