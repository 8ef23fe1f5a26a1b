"""Options for the groups of a partition: small problems of their own, solved at several budgets.

A group with its backward is a graph (`remat_graph.partition`), and a schedule of it is one way to treat the
group: what it keeps until its backward, and what its backward recomputes. As in HiRemate, there are two
budgets: for the peak, and for what is kept while the rest of the network runs. The second becomes part of the
first: between forward and backward stands an op, the `turn`, whose workspace is the part of the peak budget
that may not be kept. So any solver can solve these problems. Several pairs of budgets give a table of options
(Zhao et al. 2023, "Rockmate"), and groups that are equal up to renaming share one: they are solved once, on
whatever level of a hierarchy they are found.
"""

from collections.abc import Callable, Hashable, Sequence

import attrs

from remat_graph import Graph, Implementation, Op, Value
from remat_graph.partition import Partition, Subgraph
from remat_solvers.bounds import budget_floor
from remat_solvers.chain.table import Option, keep_all
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.linear_order import without_useless
from remat_solvers.protocol import Deadline, Problem, Solution

GAP = 0.1  # of an option from its optimum: many options are worth more than proofs; several times faster

TURN = "turn"

Solve = Callable[[Problem, Deadline], Solution]
Order = tuple[int, ...]


@attrs.define(eq=False)
class OptionTable:
    """Options of groups; each distinct group is solved once."""

    levels: int  # budgets for what a group keeps; each is tried with a loose and with a tight peak
    seconds: float | None = None  # for one small problem; None for no limit
    solves: int = 0  # small problems solved so far
    distinct: int = 0  # distinct groups solved so far
    _known: dict[Hashable, tuple[Order, ...]] = attrs.field(factory=dict, init=False)

    def options(self, groups: Partition, solve: Solve, deadline: Deadline) -> list[list[Option]]:
        """The options of every group; the first keeps everything.

        `solve` finds a schedule for a small problem; it may call this method for groups of that problem. The
        deadline is divided evenly among the groups to solve; groups that it cuts off keep everything.
        """
        subgraphs = [
            attrs.evolve(found, graph=_without_turn_limit(found.graph)) for found in groups.subgraphs
        ]
        todo = {subgraph.key: subgraph.graph for subgraph in subgraphs if subgraph.key not in self._known}
        for left, (key, graph) in zip(range(len(todo), 0, -1), todo.items(), strict=True):
            self._known[key] = self._orders(graph, solve, deadline.share(1 / left))
        options = []
        for group, subgraph in enumerate(subgraphs):
            found = (_option(groups, group, subgraph, order) for order in self._known[subgraph.key])
            distinct = dict.fromkeys([keep_all(groups, group), *(option for option in found if option)])
            options.append(list(distinct))
        return options

    def _orders(self, graph: Graph, solve: Solve, deadline: Deadline) -> tuple[Order, ...]:
        """Schedules of a small graph, from keeping much to keeping nothing."""
        budgets = _budgets(graph, self.levels)
        if not budgets:
            return ()
        self.distinct += 1
        orders: dict[Order, None] = {}
        too_tight: set[int] = set()  # peaks that were not reached; with less kept they are not either
        for i, (peak, most) in enumerate(budgets):
            if peak in too_tight or deadline.reached():
                continue
            self.solves += 1
            turned = Problem(with_turn(graph, peak - most), peak)
            left = deadline.share(1 / (len(budgets) - i))
            order = solve(turned, left.within(self.seconds)).order
            if order is None:
                too_tight.add(peak)
            else:
                orders[without_turn(graph, order)] = None
        return tuple(orders)


def _budgets(graph: Graph, levels: int) -> list[tuple[int, int]]:
    """Pairs of bytes, at the peak and at the turn; none for a group that has no choice."""
    arrays = flatten(graph)
    unplanned = evaluate(arrays, range(len(graph.ops)))
    forward = [op for op in graph.ops if not op.backward]
    backward = [op for op in graph.ops if op.backward]
    made = {v for op in forward for v in op.first.outputs}
    stays = {v for v in made if graph.values[v].pinned}
    read = {v for op in backward for v in op.first.inputs}
    handed_on = sum(map(graph.allocated_nbytes, stays))
    saved = sum(map(graph.allocated_nbytes, (made & read) - stays))
    if not unplanned.valid or not saved:
        return []
    floor = budget_floor(graph).nbytes
    tight = (floor + unplanned.peak_nbytes) // 2
    keeps = dict.fromkeys(handed_on + saved * level // levels for level in reversed(range(levels)))
    peaks = dict.fromkeys([unplanned.peak_nbytes, tight])
    return [(peak, most) for peak in peaks for most in keeps if most <= peak]


def _without_turn_limit(graph: Graph) -> Graph:
    """The graph without the limit of a turn from a higher level, which keeps it by choosing an option."""
    ways = [attrs.evolve(op.first, workspace_nbytes=0) if op.target == TURN else None for op in graph.ops]
    ops = [
        op if way is None else attrs.evolve(op, implementations=[way])
        for op, way in zip(graph.ops, ways, strict=True)
    ]
    return attrs.evolve(graph, ops=ops)


def with_turn(graph: Graph, workspace_nbytes: int) -> Graph:
    """The graph with a turn as the first op of the backward; its workspace limits what is kept."""
    place = next(i for i, op in enumerate(graph.ops) if op.backward)
    token = len(graph.values)
    turn = Op(
        name=f"turn of {graph.name}",
        target=TURN,
        backward=True,
        rerun=None,
        implementations=[Implementation(inputs=[], outputs=[token], workspace_nbytes=workspace_nbytes)],
    )
    after = [
        attrs.evolve(
            op, implementations=[attrs.evolve(w, inputs=(*w.inputs, token)) for w in op.implementations]
        )
        for op in graph.ops[place:]
    ]
    values = [*graph.values, Value(name=f"turned {graph.name}", nbytes=0)]
    return attrs.evolve(graph, values=values, ops=[*graph.ops[:place], turn, *after])


def without_turn(graph: Graph, order: Sequence[int]) -> Order:
    """An order of the graph with its turn as an order of the graph."""
    place = next(i for i, op in enumerate(graph.ops) if op.backward)
    return tuple(op - (op > place) for op in order if op != place)


def _option(groups: Partition, group: int, subgraph: Subgraph, order: Sequence[int]) -> Option | None:
    """What a schedule of a sub-graph means for the whole graph; None if its forward repeats an op."""
    graph = groups.graph
    there, back = subgraph.split(without_useless(subgraph.graph, order))
    if sorted(there) != sorted(groups.forward[group]):
        return None
    made = {v for op in there for v in graph.ops[op].first.outputs}
    saved: set[int] = set()
    recomputed: set[int] = set()
    for op in back:
        run = graph.ops[op].first
        saved.update(v for v in run.inputs if v in made and v not in recomputed)
        recomputed.update(run.outputs)
    forward = set(there)
    return Option(
        saved=frozenset(saved),
        backward=back,
        extra_s=sum(graph.ops[op].first.time_s for op in back if op in forward),
    )
