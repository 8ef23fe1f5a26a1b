"""Brute force over plans of groups: what runs when, and how each group's backward is carried out."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

from remat_graph import Graph
from remat_graph.partition import Partition
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.linear_order import without_useless

Runs = list[tuple[str, int]]


def chain_plans(i: int, j: int) -> list[Runs]:
    """Rotor's form: run a group and keep it, or run several, come back to the first ones later."""
    if i == j:
        return [[]]
    found: list[Runs] = [[("forward", i), *inner, ("backward", i)] for inner in chain_plans(i + 1, j)]
    for k in range(i + 1, j):
        there: Runs = [("forward", s) for s in range(i, k)]
        found += [there + right + left for right in chain_plans(k, j) for left in chain_plans(i, k)]
    return found


def subsets(ops: Sequence[int]) -> list[tuple[int, ...]]:
    return [chosen for count in range(len(ops) + 1) for chosen in combinations(ops, count)]


def stage_plans(count: int) -> list[Runs]:
    """H-ILP's form: before each backward any of the groups ahead run again."""
    backward = range(count - 1, -1, -1)
    return [
        [("forward", s) for s in range(count)]
        + [
            run
            for s, again in zip(backward, chosen, strict=True)
            for run in (*(("forward", g) for g in again), ("backward", s))
        ]
        for chosen in product(*(subsets(range(s + 1)) for s in backward))
    ]


def ways(groups: Partition, s: int) -> list[list[int]]:
    """Before each backward op any of the group's forward ops run again."""
    return [
        [op for again, back in zip(chosen, groups.backward[s], strict=True) for op in (*again, back)]
        for chosen in product(subsets(groups.repeats[s]), repeat=len(groups.backward[s]))
    ]


def orders(
    groups: Partition, plans: Iterable[Runs], ways: Sequence[Sequence[Sequence[int]]]
) -> set[tuple[int, ...]]:
    found = set()
    for runs in plans:
        for chosen in product(*ways):
            order: list[int] = []
            for kind, s in runs:
                order += groups.forward[s] if kind == "forward" else chosen[s]
            found.add(tuple(without_useless(groups.graph, order)))
    return found


def fastest(
    graph: Graph, orders: Iterable[tuple[int, ...]], budget: int, *, trim: bool = False
) -> float | None:
    """Extra seconds of the best that fits; `trim` takes out what can go, one repeat after the other."""
    arrays = flatten(graph)
    best = None
    for order in orders:
        result = evaluate(arrays, order)
        while result.valid and result.peak_nbytes <= budget:
            best = min(best or result.time_s, result.time_s)
            if not trim:
                break
            less = [order[:p] + order[p + 1 :] for p in range(len(order)) if order[p] in order[:p]]
            tried = [(evaluate(arrays, shorter), shorter) for shorter in less]
            fitting = [(r.time_s, shorter) for r, shorter in tried if r.valid and r.peak_nbytes <= budget]
            if not fitting:
                break
            order = min(fitting)[1]
            result = evaluate(arrays, order)
    return None if best is None else best - graph.time_s


def whole(groups: Partition) -> list[list[tuple[int, ...]]]:
    """Keep all that the backward reads."""
    return [[run] for run in groups.backward]
