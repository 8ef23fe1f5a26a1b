"""A graph's ops in groups, each group a graph of its own, and the way back.

The passes beside this file choose places at which to cut the forward; `cut` makes groups of the pieces. A cut
lies between two forward ops, and what crosses it is a set of values (skips and encoder outputs among them). A
backward op belongs to the group in which the last of the forward values that it reads has its last forward
use, made monotone along the backward, so that the backward visits the groups in reverse.

A group by itself is a training step: what it reads from outside is lent (`external`, 0 bytes), what it hands
on stays (`Role.OUTPUT`, or `Role.GRAD` where its backward makes it), and an op that may not run again at any
later time of the whole may not run again here either. So an order of the small graph is a valid part of an
order of the large one: `Subgraph.lift` and `Partition.join` are the way back. Groups that are equal up to
renaming have equal keys, and one order serves all of them.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import attrs

from remat_graph.ir import Graph, Implementation, Op, Role, Value


def forward_ops(graph: Graph) -> list[int]:
    """Indices of the forward ops."""
    return [i for i, op in enumerate(graph.ops) if not op.backward]


def repeatable(graph: Graph, ops: Iterable[int]) -> list[int]:
    """Those ops that may run again at any later time.

    What their repeat reads is never overwritten, and it writes no buffer itself.
    """
    replaced = {value.replaces for value in graph.values if value.replaces is not None}
    chosen = []
    for i in ops:
        rerun = graph.ops[i].rerun
        if rerun is None:
            continue
        again = graph.ops[i].implementations[rerun]
        writes = any(graph.values[v].external for v in again.outputs)
        if not writes and not replaced.intersection(again.inputs):
            chosen.append(i)
    return chosen


@attrs.frozen(kw_only=True, eq=False)
class Subgraph:
    """A group as a graph of its own.

    Attributes:
        graph: its ops, forward first.
        ops: index in the whole graph of each op.
        values: index in the whole graph of each value.
    """

    graph: Graph
    ops: tuple[int, ...]
    values: tuple[int, ...]

    @cached_property
    def key(self) -> Hashable:
        """Equal for sub-graphs that are equal up to renaming: an order of one is an order of the other."""
        return (
            tuple((v.nbytes, v.role, v.external, v.replaces) for v in self.graph.values),
            tuple((op.backward, op.rerun, op.implementations) for op in self.graph.ops),
        )

    def lift(self, order: Iterable[int]) -> tuple[int, ...]:
        """The same ops by their indices in the whole graph."""
        return tuple(self.ops[op] for op in order)

    def split(self, order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lift an order in two parts: until the last forward op has run first, and from there on."""
        seen: set[int] = set()
        boundary = 0
        for position, op in enumerate(order):
            if op not in seen and not self.graph.ops[op].backward:
                boundary = position + 1
            seen.add(op)
        return self.lift(order[:boundary]), self.lift(order[boundary:])


@attrs.frozen(kw_only=True, eq=False)
class Partition:
    """A graph's ops in groups: the forward visits them in turn, the backward in reverse.

    Attributes:
        graph: the graph.
        forward: per group, its forward ops in order.
        backward: per group, the backward ops that belong to it, in order.
    """

    graph: Graph
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def _life(self) -> dict[int, tuple[int, int]]:
        """Per value of the forward, the group that makes it and the last one whose forward reads it."""
        return _forward_life(self.graph, self.forward)

    @cached_property
    def crossing(self) -> tuple[frozenset[int], ...]:
        """Per group, the values made before it that it or a later one reads in the forward."""
        found: list[list[int]] = [[] for _ in self.forward]
        for v, (made, last) in self._life.items():
            for group in range(made + 1, last + 1):
                found[group].append(v)
        return tuple(map(frozenset, found))

    @cached_property
    def saved(self) -> tuple[frozenset[int], ...]:
        """Per group, the values made in its forward that the backward reads."""
        read = {v for run in self.backward for op in run for v in self.graph.ops[op].first.inputs}
        found: list[list[int]] = [[] for _ in self.forward]
        for v, (made, _) in self._life.items():
            if v in read:
                found[made].append(v)
        return tuple(map(frozenset, found))

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Per value the ops that read it."""
        found: dict[int, set[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for way in op.implementations:
                for v in way.inputs:
                    found.setdefault(v, set()).add(i)
        return found

    @cached_property
    def _repeatable(self) -> frozenset[int]:
        return frozenset(repeatable(self.graph, range(len(self.graph.ops))))

    @cached_property
    def repeats(self) -> tuple[tuple[int, ...], ...]:
        """Per group, its forward ops that may run again at any later time, in order."""
        return tuple(tuple(op for op in run if op in self._repeatable) for run in self.forward)

    @cached_property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """Every group as a graph of its own."""
        return tuple(map(self._subgraph, range(len(self))))

    def join(self, orders: Mapping[int, Sequence[int]]) -> list[int]:
        """An order of the whole from orders of some groups' sub-graphs; the other groups are not planned.

        Args:
            orders: per group a valid order of its sub-graph, all of whose backward ops come after its
                forward's first runs.
        """
        there: list[int] = []
        back: list[tuple[int, ...]] = []
        for group, subgraph in enumerate(self.subgraphs):
            forward, backward = subgraph.split(orders.get(group, range(len(subgraph.ops))))
            there += forward
            back.append(backward)
        return there + [op for part in reversed(back) for op in part]

    def _subgraph(self, group: int) -> Subgraph:
        graph = self.graph
        ops = (*self.forward[group], *self.backward[group])
        inside = frozenset(ops)
        number: dict[int, int] = {}
        for i in ops:
            for way in graph.ops[i].implementations:
                for v in (*way.inputs, *way.outputs):
                    number.setdefault(v, len(number))
        makers = {v: graph.ops[i] for i in ops for way in graph.ops[i].implementations for v in way.outputs}
        values = [
            self._inner(v, makers[v], inside, number) if v in makers else self._outer(v, number)
            for v in number
        ]
        small = Graph(
            name=f"{graph.name}[{group}]",
            values=values,
            ops=[self._op(i, number, makers) for i in ops],
            rounding_nbytes=graph.rounding_nbytes,
        )
        return Subgraph(graph=small, ops=ops, values=tuple(number))

    def _outer(self, v: int, number: Mapping[int, int]) -> Value:
        """A value that the rest of the graph lends."""
        replaces = self.graph.values[v].replaces
        link = None if replaces is None else number.get(replaces)
        return Value(name=self.graph.values[v].name, nbytes=0, external=True, replaces=link)

    def _inner(self, v: int, maker: Op, inside: frozenset[int], number: Mapping[int, int]) -> Value:
        """A value of the group's own; it stays if the rest of the graph reads it."""
        value = self.graph.values[v]
        handed_on = v in maker.first.outputs and not self._readers.get(v, set()) <= inside
        role = value.role
        if handed_on and not (value.pinned or value.external):
            role = Role.GRAD if maker.backward else Role.OUTPUT
        link = None if value.replaces is None else number.get(value.replaces)
        return Value(name=value.name, nbytes=value.nbytes, role=role, external=value.external, replaces=link)

    def _op(self, i: int, number: Mapping[int, int], makers: Mapping[int, Op]) -> Op:
        op = self.graph.ops[i]
        ways = [
            Implementation(
                inputs=[number[v] for v in way.inputs],
                outputs=[number[v] for v in way.outputs],
                time_s=way.time_s,
                workspace_nbytes=way.workspace_nbytes,
                reuses=[(number[made], number[source]) for made, source in way.reuses if source in makers],
            )
            for way in op.implementations
        ]
        rerun = op.rerun if i in self._repeatable else None
        return attrs.evolve(op, implementations=ways, rerun=rerun)


def cut(graph: Graph, places: Sequence[int]) -> Partition:
    """Cut the forward before each of the given places.

    Args:
        graph: the graph.
        places: rising places in the list of forward ops, without 0.
    """
    ops = forward_ops(graph)
    bounds = [0, *places, len(ops)]
    forward = tuple(tuple(ops[a:b]) for a, b in pairwise(bounds))
    life = _forward_life(graph, forward)
    backward: list[list[int]] = [[] for _ in forward]
    lowest = len(forward) - 1
    for i, op in enumerate(graph.ops):
        if op.backward:
            lowest = min([lowest, *(life[v][1] for v in op.first.inputs if v in life)])
            backward[lowest].append(i)
    return Partition(graph=graph, forward=forward, backward=tuple(map(tuple, backward)))


def _forward_life(graph: Graph, forward: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    made: dict[int, int] = {}
    for group, run in enumerate(forward):
        for op in run:
            for v in graph.ops[op].first.outputs:
                if not graph.values[v].external:
                    made[v] = group
    last = dict(made)
    for group, run in enumerate(forward):
        for op in run:
            for v in graph.ops[op].first.inputs:
                if v in last:
                    last[v] = group
    return {v: (group, last[v]) for v, group in made.items()}


def crossing_nbytes(graph: Graph) -> list[int]:
    """Per place 0 to n between n forward ops, the bytes made before it that the forward reads behind it."""
    ops = forward_ops(graph)
    change = [0] * (len(ops) + 2)
    for place, last, v in _spans(graph, ops):
        change[place + 1] += graph.allocated_nbytes(v)
        change[last + 1] -= graph.allocated_nbytes(v)
    return _sums(change)[: len(ops) + 1]


def crossing_values(graph: Graph) -> list[int]:
    """Per place 0 to n between n forward ops, how many values made before it the forward reads behind it."""
    ops = forward_ops(graph)
    change = [0] * (len(ops) + 2)
    for place, last, v in _spans(graph, ops):
        if not graph.values[v].external:
            change[place + 1] += 1
            change[last + 1] -= 1
    return _sums(change)[: len(ops) + 1]


def _spans(graph: Graph, ops: Sequence[int]) -> list[tuple[int, int, int]]:
    """(place made, place last read, value) of what the forward reads again."""
    last = {v: place for place, op in enumerate(ops) for v in graph.ops[op].first.inputs}
    return [
        (place, last[v], v)
        for place, op in enumerate(ops)
        for v in graph.ops[op].first.outputs
        if last.get(v, -1) > place
    ]


def _sums(changes: Iterable[int]) -> list[int]:
    total, found = 0, []
    for change in changes:
        total += change
        found.append(total)
    return found
