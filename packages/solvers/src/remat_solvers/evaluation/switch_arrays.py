"""A graph with switches as arrays: the variants of all ways to run an op, and what each switch puts in force.

A search then flips switches without a new graph. Its sequences run every op of the graph; an op that runs
nothing under a decision is a run without reads, results or time. `narrow` and `widen` lead to the sequences
of one decided graph and back.
"""

from collections.abc import Iterable

import attrs
import numpy as np

from remat_graph import Graph, Op, Specialized, specialize
from remat_graph.switches.conflicts import Conflicts, conflicts
from remat_graph.switches.specialize import family_of, runs_nothing
from remat_solvers.evaluation.arrays import Arrays, Ints, compressed, flatten


@attrs.frozen(kw_only=True, eq=False)
class SwitchArrays:
    """All ways to run the ops of a graph with switches.

    Attributes:
        graph: the graph.
        arrays: per op as usual; rows and times are two a way, first run and repeat, and `first_row` says
            where those of an op begin.
        first_row: per op its rows with all switches off.
        owner: per pair of rows the op.
        void: per row whether it runs nothing.
        names: the switches, family by family, each in the order of the ops.
        ops: per switch the ops that it changes.
        rows: per switch and op, as in `ops`, the rows that are in force with it.
        conflicts: of each switch.
    """

    graph: Graph
    arrays: Arrays
    first_row: Ints
    owner: Ints
    void: Ints
    names: tuple[str, ...]
    ops: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    conflicts: Conflicts

    @classmethod
    def of(cls, graph: Graph) -> "SwitchArrays":
        """Convert a graph with switches."""
        ways: list[Op] = []
        owner: list[int] = []
        first_row: list[int] = []
        changes: dict[str, list[tuple[int, int]]] = {switch: [] for switch in graph.switches}
        for i, op in enumerate(graph.ops):
            first_row.append(2 * len(ways))
            runs = [(op.rerun, 0), *((other.again, other.first) for other in op.alternatives)]
            for other in op.alternatives:
                changes[other.switch].append((i, 2 * (len(ways) + 1 + op.alternatives.index(other))))
            for again, first in runs:
                ways.append(_way(op, first, again, len(ways)))
                owner.append(i)
        wide = flatten(attrs.evolve(graph, ops=ways))
        owners = np.array(owner, np.int64)
        families = {family_of(switch): n for n, switch in reversed(list(enumerate(graph.switches)))}
        names = sorted(graph.switches, key=lambda switch: families[family_of(switch)])
        return cls(
            graph=graph,
            arrays=wide._replace(
                backward=np.array([op.backward for op in graph.ops], np.uint8),
                producer=np.where(wide.producer < 0, -1, owners[wide.producer]),
            ),
            first_row=np.array(first_row, np.int64),
            owner=owners,
            void=np.array([runs_nothing(run) for way in ways for run in (way.first,) * 2], np.int64),
            names=tuple(names),
            ops=tuple(tuple(op for op, _ in changes[name]) for name in names),
            rows=tuple(tuple(row for _, row in changes[name]) for name in names),
            conflicts=conflicts(graph),
        )

    def families(self) -> tuple[Ints, Ints]:
        """The switches of each family, in compressed rows; its members are neighbours in `names`."""
        rows: dict[str, list[int]] = {}
        for n, name in enumerate(self.names):
            rows.setdefault(family_of(name), []).append(n)
        return compressed(list(rows.values()))

    def widen(self, decided: Specialized, order: Iterable[int]) -> Ints:
        """A sequence of a decided graph with the ops that it lacks, as early as any of their ways allows."""
        sequence = [decided.ops[op] for op in order]
        first: dict[int, int] = {}
        for position, op in enumerate(sequence):
            first.setdefault(op, position)
        # An op that may read a tangent comes after all of the forward.
        last = max((at for op, at in first.items() if not self.graph.ops[op].backward), default=-1)
        makers: dict[int, list[int]] = {}
        for i, each in enumerate(self.graph.ops):
            for value in {v for run in each.implementations for v in run.outputs}:
                makers.setdefault(value, []).append(i)
        lacking: dict[int, list[int]] = {}
        for void in decided.voids:
            i = void.run.op
            read = {v for run in self.graph.ops[i].implementations for v in run.inputs}
            before = [first[maker] for v in read for maker in makers.get(v, ()) if maker in first]
            first[i] = max(before, default=-1) if not void.backward else max((last, *before))
            lacking.setdefault(first[i], []).append(i)
        wide = list(lacking.get(-1, ()))
        for position, op in enumerate(sequence):
            wide += [op, *lacking.get(position, ())]
        return np.array(wide, np.int64)

    def narrow(self, on: Iterable[str], order: Iterable[int]) -> tuple[Specialized, Ints]:
        """The decided graph, and the sequence without the ops that it lacks."""
        decided = specialize(self.graph, on)
        place = {op: n for n, op in enumerate(decided.ops)}
        return decided, np.array([place[op] for op in order if op in place], np.int64)


def _way(op: Op, first: int, again: int | None, number: int) -> Op:
    """An op that runs in one way only."""
    numbers = (first,) if again in (None, first) else (first, again)
    return attrs.evolve(
        op,
        name=f"{op.name}#{number}",
        implementations=[op.implementations[n] for n in numbers if n is not None],
        rerun=None if again is None else len(numbers) - 1,
        alternatives=(),
    )
