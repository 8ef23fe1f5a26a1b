"""Options for the segments of a chain: small problems of their own, solved at several budgets.

A segment with its backward is a graph: what it reads from outside is external, what it hands on stays, and a
budget for it alone gives one way to treat it: what it keeps until its backward, and what its backward runs
again. Several budgets give a menu, from which the table of `chain_dp` chooses (Zhao et al. 2023, "Rockmate").
Segments that are equal up to renaming are solved once.
"""

from collections.abc import Callable, Hashable, Sequence

import attrs
import numpy as np

from remat_graph import Graph, Implementation, Role, Value
from remat_solvers.bounds import budget_floor
from remat_solvers.chain_dp import Option, keep_all
from remat_solvers.evaluate import evaluate, flatten
from remat_solvers.linear import Segments, without_useless
from remat_solvers.protocol import Deadline, Problem, Solution

Solve = Callable[[Problem, Deadline], Solution]


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """A segment as a graph of its own.

    Attributes:
        graph: its ops, forward first.
        ops: index in the whole graph of each op.
        values: index in the whole graph of each value.
    """

    graph: Graph
    ops: tuple[int, ...]
    values: tuple[int, ...]

    def key(self) -> Hashable:
        """Equal for pieces that are equal up to renaming."""
        return (
            tuple((v.nbytes, v.role, v.external) for v in self.graph.values),
            tuple((op.backward, op.rerun, op.implementations) for op in self.graph.ops),
        )


def piece_of(graph: Graph, pieces: Segments, segment: int) -> Piece:
    """Cut a segment out of a graph; what crosses its end, and what its backward hands on, is pinned."""
    ops = (*pieces.forward[segment], *pieces.backward[segment])
    made = {v for i in ops for way in graph.ops[i].implementations for v in way.outputs}
    inside = set(ops)
    used_outside = {
        v
        for i, op in enumerate(graph.ops)
        if i not in inside
        for way in op.implementations
        for v in way.inputs
    }
    number: dict[int, int] = {}
    values: list[Value] = []
    for i in ops:
        for way in graph.ops[i].implementations:
            for v in (*way.inputs, *way.outputs):
                if v not in number:
                    number[v] = len(values)
                    values.append(_renamed(graph.values[v], v, v in made, v in used_outside))
    renumbered = []
    for i in ops:
        op = graph.ops[i]
        ways = [
            Implementation(
                inputs=[number[v] for v in way.inputs],
                outputs=[number[v] for v in way.outputs],
                time_s=way.time_s,
                workspace_nbytes=way.workspace_nbytes,
            )
            for way in op.implementations
        ]
        renumbered.append(attrs.evolve(op, implementations=ways))
    made_graph = Graph(
        name=f"{graph.name}[{segment}]",
        values=values,
        ops=renumbered,
        rounding_nbytes=graph.rounding_nbytes,
    )
    return Piece(graph=made_graph, ops=ops, values=tuple(number))


def _renamed(value: Value, index: int, made: bool, used_outside: bool) -> Value:
    if not made:
        return Value(name=value.name or str(index), nbytes=0, external=True)
    pinned = value.pinned or used_outside
    role = Role.OUTPUT if pinned else Role.ACTIVATION
    return Value(name=value.name or str(index), nbytes=value.nbytes, role=role, external=value.external)


def menus(
    graph: Graph, pieces: Segments, solve: Solve, levels: int, seconds: float | None, deadline: Deadline
) -> list[list[Option]]:
    """Options of every segment.

    Args:
        graph: the whole graph.
        pieces: its segments.
        solve: finds a schedule for a small problem.
        levels: budgets to try for each distinct segment.
        seconds: for one small problem; None for no limit.
        deadline: of the whole; segments that it cuts off keep all.
    """
    known: dict[Hashable, list[tuple[int, ...]]] = {}
    found = []
    for segment in range(len(pieces)):
        piece = piece_of(graph, pieces, segment)
        key = piece.key()
        if key not in known:
            known[key] = [] if deadline.reached() else _orders(piece.graph, solve, levels, seconds, deadline)
        options = {keep_all(pieces, segment): None}
        for order in known[key]:
            option = _option(graph, pieces, segment, piece, order)
            if option is not None:
                options[option] = None
        found.append(list(options))
    return found


def _orders(
    graph: Graph, solve: Solve, levels: int, seconds: float | None, deadline: Deadline
) -> list[tuple[int, ...]]:
    """Schedules of a small graph at budgets between its floor and its unplanned peak."""
    unplanned = evaluate(flatten(graph), range(len(graph.ops)))
    if not unplanned.valid:
        return []
    floor = budget_floor(graph).nbytes
    orders: dict[tuple[int, ...], None] = {}
    for budget in np.linspace(floor, unplanned.peak_nbytes, levels + 1)[:-1]:
        if deadline.reached():
            break
        order = solve(Problem(graph, int(budget)), deadline.within(seconds)).order
        if order is not None:
            orders[order] = None
    return list(orders)


def _option(
    graph: Graph, pieces: Segments, segment: int, piece: Piece, order: Sequence[int]
) -> Option | None:
    """What a schedule of a piece means for the whole; None if its forward repeats an op."""
    forward = len(pieces.forward[segment])
    order = without_useless(piece.graph, order)
    if sorted(order[:forward]) != list(range(forward)):
        return None
    backward = tuple(piece.ops[op] for op in order[forward:])
    made = {v for op in pieces.forward[segment] for v in graph.ops[op].first.outputs}
    saved: set[int] = set()
    remade: set[int] = set()
    for op in backward:
        run = graph.ops[op].first
        saved.update(v for v in run.inputs if v in made and v not in remade)
        remade.update(run.outputs)
    repeats = [op for op in backward if op in set(pieces.forward[segment])]
    return Option(
        saved=frozenset(saved),
        backward=backward,
        extra_s=sum(graph.ops[op].first.time_s for op in repeats),
    )
