"""Brute force over Checkmate's stage form: every choice of what is kept from stage to stage."""

from collections.abc import Iterator
from itertools import combinations

from remat_graph import Graph


def fastest_s(graph: Graph, budget_nbytes: int) -> float:
    """Least compute time in trace order with an op at most once a stage; infinite if nothing fits.

    A state is what is kept at the beginning of a stage; given the next state, what must run follows. One
    implementation an op, no reuse. Tangents are live from the end of the forward until they are dropped.
    """
    ops, size = graph.ops, [graph.allocated_nbytes(v) for v in range(len(graph.values))]
    pinned = {v for v, value in enumerate(graph.values) if value.pinned}
    maker = {v: i for i, op in enumerate(ops) for v in op.first.outputs}
    read = {v for op in ops for v in op.first.inputs}
    tangents = {v for v in graph.tangents if v in read}
    unread = sum(size[v] for v in graph.tangents if v not in read)
    boundary = sum(not op.backward for op in ops)
    reads = [[v for v in op.first.inputs if v in maker or v in tangents] for op in ops]
    read_at_all = {v for read in reads for v in read} - pinned

    def runs_of(t: int, kept: frozenset[int], then: frozenset[int]) -> list[int] | None:
        wanted = [t, *(maker[v] for v in then - kept if v in maker)]
        if any(v in tangents and v not in kept for v in then) and t + 1 != boundary:
            return None
        found: set[int] = set()
        while wanted:
            op = wanted.pop()
            if op in found:
                continue
            if op != t and ops[op].rerun is None:
                return None
            found.add(op)
            for v in reads[op]:
                if v in kept or (v in pinned and maker[v] < t):
                    continue
                if v not in maker:
                    return None
                wanted.append(maker[v])
        return sorted(found)

    def peak(t: int, kept: frozenset[int], runs: list[int], then: frozenset[int]) -> int:
        held = sum(size[v] for v in kept) + sum(size[v] for v in pinned if maker[v] < t)
        held += unread if t >= boundary else 0
        live, most = set(kept), 0
        for place, op in enumerate(runs):
            new = [v for v in ops[op].first.outputs if not (v in pinned and maker[v] < t)]
            held += sum(size[v] for v in new)
            live.update(v for v in new if v not in pinned)
            again = sum(size[v] for v in ops[op].first.outputs if v in pinned and maker[v] < t)
            most = max(most, held + again + ops[op].first.workspace_nbytes)
            later = {v for other in runs[place + 1 :] for v in reads[other]}
            touched = {*reads[op], *new}
            gone = {v for v in live & touched if v not in later and v not in then}
            held -= sum(size[v] for v in gone)
            live -= gone
        return most

    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    for t in range(len(ops)):
        after: dict[frozenset[int], float] = {}
        made = {v for v, i in maker.items() if i <= t} & read_at_all
        fresh = tangents & read_at_all if t + 1 == boundary else set()
        for kept, seconds in states.items():
            for then in _subsets(sorted((kept & read_at_all) | made | fresh), size, budget_nbytes):
                runs = runs_of(t, kept, then)
                if runs is None or peak(t, kept, runs, then) > budget_nbytes:
                    continue
                cost = seconds + sum(ops[op].first.time_s for op in runs)
                if cost < after.get(then, float("inf")):
                    after[then] = cost
        states = after
    return min(states.values(), default=float("inf"))


def _subsets(values: list[int], size: list[int], budget_nbytes: int) -> Iterator[frozenset[int]]:
    for count in range(len(values) + 1):
        for chosen in combinations(values, count):
            if sum(size[v] for v in chosen) <= budget_nbytes:
                yield frozenset(chosen)
