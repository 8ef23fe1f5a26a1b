"""Brute force over every order and any number of recomputations, for graphs of a few ops."""

import heapq

from remat_graph import Graph


def fastest_s(graph: Graph, budget_nbytes: int) -> float:
    """Least compute time of any valid schedule within the budget; infinite if there is none.

    Dijkstra over (ops that ran, values live); a move runs an op or frees a value. One
    implementation an op, no reuse.
    """
    ops, size = graph.ops, [graph.allocated_nbytes(v) for v in range(len(graph.values))]
    forward = sum(1 << i for i, op in enumerate(ops) if not op.backward)
    every = (1 << len(ops)) - 1
    external = sum(1 << v for v, value in enumerate(graph.values) if value.external)
    pinned = sum(1 << v for v, value in enumerate(graph.values) if value.pinned)
    tangents = sum(1 << v for v in graph.tangents)
    masks = [(sum(1 << v for v in op.first.inputs), sum(1 << v for v in op.first.outputs)) for op in ops]

    def held(live: int) -> int:
        return sum(size[v] for v in range(len(size)) if live >> v & 1)

    heap, seen = [(0.0, 0, external)], set()
    while heap:
        seconds, ran, live = heapq.heappop(heap)
        if (ran, live) in seen:
            continue
        seen.add((ran, live))
        if ran == every:
            return seconds
        for v in range(len(size)):
            if live >> v & 1 and not (external | pinned) >> v & 1:
                heapq.heappush(heap, (seconds, ran, live & ~(1 << v)))
        for i, (inputs, outputs) in enumerate(masks):
            if inputs & ~live or outputs & live & ~pinned:
                continue
            if held(live) + held(outputs) + ops[i].first.workspace_nbytes > budget_nbytes:
                continue
            now, alive = ran | 1 << i, live | outputs
            if ran & forward != forward and now & forward == forward:
                alive |= tangents
                if held(alive) > budget_nbytes + held(tangents):
                    continue
            heapq.heappush(heap, (seconds + ops[i].first.time_s, now, alive))
    return float("inf")
