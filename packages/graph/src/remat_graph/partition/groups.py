"""Partition the ops of a graph into groups, make each group a graph, and map orders back.

The other files of this folder choose positions at which to cut the forward; `cut` makes the groups. A cut
lies between two forward ops, and a set of values crosses it (skips and encoder outputs among them). A
backward op belongs to the group in which the last of the forward values that it reads has its last forward
use, made monotone along the backward, so that the backward visits the groups in reverse.

A group is a training step of its own: values from outside are external (0 bytes), values that other groups
read stay (`Role.OUTPUT`, or `Role.GRAD` where its backward makes them), and an op that may not repeat at any
later time of the whole graph may not repeat here either. So an order of the subgraph is a valid part of an
order of the whole graph: `Subgraph.lift` and `Partition.join` map it back. Groups that are equal up to
renaming have equal keys, and one order serves all of them.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise

import attrs

from remat_graph.ir import Graph, Op, Role, Value


def forward_ops(graph: Graph) -> list[int]:
    """Indices of the forward ops."""
    return [i for i, op in enumerate(graph.ops) if not op.backward]


def repeatable(graph: Graph, ops: Iterable[int]) -> list[int]:
    """Those ops that may repeat at any later time: nothing overwrites their inputs, they write no buffer."""
    replaced = {value.replaces for value in graph.values if value.replaces is not None}
    chosen = []
    for i in ops:
        rerun = graph.ops[i].rerun
        if rerun is None:
            continue
        repeat = graph.ops[i].implementations[rerun]
        writes = any(graph.values[v].external for v in repeat.outputs)
        if not writes and not replaced.intersection(repeat.inputs):
            chosen.append(i)
    return chosen


@attrs.frozen(kw_only=True, eq=False)
class Subgraph:
    """A group as a graph of its own.

    Attributes:
        graph: the ops of the group, forward first.
        ops: index in the whole graph of each op.
        values: index in the whole graph of each value.
    """

    graph: Graph
    ops: tuple[int, ...]
    values: tuple[int, ...]

    @cached_property
    def key(self) -> Hashable:
        """Equal for subgraphs that are equal up to renaming: an order of one is an order of the other."""
        return (
            tuple((v.nbytes, v.role, v.external, v.replaces) for v in self.graph.values),
            tuple((op.backward, op.rerun, op.implementations) for op in self.graph.ops),
        )

    def lift(self, order: Iterable[int]) -> tuple[int, ...]:
        """The same ops by their indices in the whole graph."""
        return tuple(self.ops[op] for op in order)

    def split(self, order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lift an order in two parts, split after the last forward op that runs for the first time."""
        seen: set[int] = set()
        boundary = 0
        for position, op in enumerate(order):
            if op not in seen and not self.graph.ops[op].backward:
                boundary = position + 1
            seen.add(op)
        return self.lift(order[:boundary]), self.lift(order[boundary:])


@attrs.frozen(kw_only=True, eq=False)
class Partition:
    """The ops of a graph in groups: the forward visits them in turn, the backward in reverse.

    Attributes:
        graph: the graph.
        forward: per group, its forward ops in order.
        backward: per group, its backward ops in order.
    """

    graph: Graph
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def _life(self) -> dict[int, tuple[int, int]]:
        """Per value of the forward, the group that makes it and the last group whose forward reads it."""
        return _forward_life(self.graph, self.forward)

    @cached_property
    def crossing(self) -> tuple[frozenset[int], ...]:
        """Per group, the values made before it that its forward or a later one reads."""
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
        """Per value, the ops that read it."""
        found: dict[int, set[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for v in chain.from_iterable(implementation.inputs for implementation in op.implementations):
                found.setdefault(v, set()).add(i)
        return found

    @cached_property
    def _repeatable(self) -> frozenset[int]:
        return frozenset(repeatable(self.graph, range(len(self.graph.ops))))

    @cached_property
    def repeats(self) -> tuple[tuple[int, ...], ...]:
        """Per group, its forward ops that may repeat at any later time, in order."""
        return tuple(tuple(op for op in run if op in self._repeatable) for run in self.forward)

    @cached_property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """Every group as a graph."""
        return tuple(map(self._subgraph, range(len(self))))

    def join(self, orders: Mapping[int, Sequence[int]]) -> list[int]:
        """An order of the whole graph from valid orders of some subgraphs; the other groups run unplanned.

        In each order, every backward op comes after the first runs of all forward ops.
        """
        forward: list[int] = []
        backward: list[tuple[int, ...]] = []
        for group, subgraph in enumerate(self.subgraphs):
            forward_part, backward_part = subgraph.split(orders.get(group, range(len(subgraph.ops))))
            forward += forward_part
            backward.append(backward_part)
        return forward + [op for part in reversed(backward) for op in part]

    def _subgraph(self, group: int) -> Subgraph:
        graph = self.graph
        ops = (*self.forward[group], *self.backward[group])
        inside = frozenset(ops)
        number: dict[int, int] = {}
        for i in ops:
            for run in graph.ops[i].implementations:
                for v in (*run.inputs, *run.outputs):
                    number.setdefault(v, len(number))
        makers = {v: graph.ops[i] for i in ops for run in graph.ops[i].implementations for v in run.outputs}
        values = [
            self._inner(v, makers[v], inside, number) if v in makers else self._outer(v, number)
            for v in number
        ]
        subgraph = Graph(
            name=f"{graph.name}[{group}]",
            values=values,
            ops=[self._op(i, number, makers) for i in ops],
            rounding_nbytes=graph.rounding_nbytes,
        )
        return Subgraph(graph=subgraph, ops=ops, values=tuple(number))

    def _outer(self, v: int, number: Mapping[int, int]) -> Value:
        """A value of the rest of the graph, as an external one."""
        replaces = self.graph.values[v].replaces
        link = None if replaces is None else number.get(replaces)
        return Value(name=self.graph.values[v].name, nbytes=0, external=True, replaces=link)

    def _inner(self, v: int, maker: Op, inside: frozenset[int], number: Mapping[int, int]) -> Value:
        """A value that the group makes; it stays if the rest of the graph reads it."""
        value = self.graph.values[v]
        read_outside = v in maker.first.outputs and not self._readers.get(v, set()) <= inside
        role = value.role
        if read_outside and not (value.pinned or value.external):
            role = Role.GRAD if maker.backward else Role.OUTPUT
        link = None if value.replaces is None else number.get(value.replaces)
        return Value(name=value.name, nbytes=value.nbytes, role=role, external=value.external, replaces=link)

    def _op(self, i: int, number: Mapping[int, int], makers: Mapping[int, Op]) -> Op:
        op = self.graph.ops[i]
        implementations = [
            attrs.evolve(
                whole,
                inputs=[number[v] for v in whole.inputs],
                outputs=[number[v] for v in whole.outputs],
                reuses=[(number[made], number[source]) for made, source in whole.reuses if source in makers],
            )
            for whole in op.implementations
        ]
        rerun = op.rerun if i in self._repeatable else None
        return attrs.evolve(op, implementations=implementations, rerun=rerun)


def cut(graph: Graph, places: Sequence[int]) -> Partition:
    """Cut the forward before each of `places`: increasing positions in the list of forward ops, without 0."""
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
    life: dict[int, tuple[int, int]] = {}
    for group, ops in enumerate(forward):
        for op in ops:
            life.update((v, (life[v][0], group)) for v in graph.ops[op].first.inputs if v in life)
            made = (v for v in graph.ops[op].first.outputs if not graph.values[v].external)
            life.update((v, (group, group)) for v in made)
    return life


def crossing_nbytes(graph: Graph) -> list[int]:
    """Per position 0 to n between n forward ops, the bytes made before it that the forward reads after it."""
    return _crossing(graph, graph.allocated_nbytes)


def crossing_values(graph: Graph) -> list[int]:
    """Per position 0 to n between n forward ops, how many values cross it as in `crossing_nbytes`."""
    return _crossing(graph, lambda v: 0 if graph.values[v].external else 1)


def _crossing(graph: Graph, weight: Callable[[int], int]) -> list[int]:
    """Per position, the total weight of the values made before it that the forward reads after it."""
    ops = forward_ops(graph)
    last_read = {v: at for at, op in enumerate(ops) for v in graph.ops[op].first.inputs}
    change = [0] * (len(ops) + 1)
    for at, op in enumerate(ops):
        for v in graph.ops[op].first.outputs:
            if last_read.get(v, -1) > at:
                change[at + 1] += weight(v)
                change[last_read[v] + 1] -= weight(v)
    return list(accumulate(change))
