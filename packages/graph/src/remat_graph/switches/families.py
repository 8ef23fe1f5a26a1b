"""Families of switches: those of a graph, and the graph without some of them."""

from collections.abc import Collection, Iterable

import attrs

from remat_graph.errors import UnknownFamily
from remat_graph.ir import Alternative, Graph, Op
from remat_graph.switches.specialize import count_of_values, family_of, runs_nothing


def families_in(graph: Graph) -> tuple[str, ...]:
    """The families of a graph's switches, sorted."""
    return tuple(sorted(set(map(family_of, graph.switches))))


def check_families(graph: Graph, names: Iterable[str]) -> None:
    """Check names of families.

    Raises:
        UnknownFamily: the graph has no switch of such a family.
    """
    known = families_in(graph)
    for name in names:
        if name not in known:
            raise UnknownFamily(name=name, known=known)


def without_families(graph: Graph, names: Collection[str]) -> Graph:
    """The graph without the switches of these families, as if captured without them.

    Ops that ran only under those are left out, so later ops have other indices.

    Raises:
        UnknownFamily: the graph has no switch of such a family.
    """
    check_families(graph, names)
    ops: list[Op] = []
    for op in graph.ops:
        kept = tuple(other for other in op.alternatives if family_of(other.switch) not in names)
        if kept or not op.alternatives or not runs_nothing(op.first):
            ops.append(op if kept == op.alternatives else _with_alternatives(op, kept))
    return attrs.evolve(graph, ops=ops, values=graph.values[: count_of_values(graph, ops)])


def _with_alternatives(op: Op, kept: tuple[Alternative, ...]) -> Op:
    """The op with these alternatives, and with the implementations that it still needs."""
    needed = {0, op.rerun, *(n for other in kept for n in (other.first, other.again))}
    numbers = sorted(n for n in needed if n is not None)
    place = {n: i for i, n in enumerate(numbers)}
    return attrs.evolve(
        op,
        implementations=tuple(op.implementations[n] for n in numbers),
        rerun=None if op.rerun is None else place[op.rerun],
        alternatives=tuple(
            attrs.evolve(
                other,
                first=place[other.first],
                again=None if other.again is None else place[other.again],
            )
            for other in kept
        ),
    )
