"""`hiremate`: a hierarchy of groups, each planned by the method that suits it.

After HiRemate (hierarchical rematerialization): a graph that is too large for the good solvers is grouped.
Each distinct group becomes its own graph and is solved at several budgets for its peak and for what it keeps,
by grouping it again if it is still too large, and `chain.table` chooses among the results. A level whose
articulation points leave only small pieces is a chain and is cut there, as in `rotor`; any other is grouped
from bottom to top. Small graphs are solved by the integer program of `checkmate` and by the sequence search,
and the better result counts. Equal groups are solved once, on all levels together.

Plans of a table that exceed the budget are repaired, and plans are polished; see `repair`.
"""

from math import inf
from typing import ClassVar

import attrs
import numpy as np

from remat_graph import Graph
from remat_graph.partition import Partition, at_articulations, grouped
from remat_solvers.chain.block_options import GAP, OptionTable
from remat_solvers.chain.table import chain_orders
from remat_solvers.evaluation.arrays import Ints, flatten
from remat_solvers.local_search.repair import repair_orders
from remat_solvers.methods.annealing import Search
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.methods.hierarchy import Hierarchical
from remat_solvers.protocol import Deadline, Problem, Solution, judge, level_count, part_count, time_limit


@attrs.frozen(kw_only=True)
class HiremateSolver(Hierarchical):
    """Groups of groups, with options for each group.

    Attributes:
        segments: most groups of one level.
        leaf: a graph with at most this many ops is not cut.
        exact: a graph with at most this many ops is also solved by the integer program.
        slots: memory levels of a table.
        levels: budgets for what each distinct group keeps.
        leaf_seconds: limit by the clock for the integer program of one leaf at one budget; None for none.
        moves: of the search in one leaf.
        seed: of the search.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "hiremate"
    segments: int = part_count(16, 2)
    leaf: int = attrs.field(default=80, validator=attrs.validators.ge(2))
    exact: int = attrs.field(default=40, validator=attrs.validators.ge(0))
    slots: int = level_count(400)
    levels: int = part_count(6)
    leaf_seconds: float | None = time_limit(1.0)
    moves: int = attrs.field(default=20_000, validator=attrs.validators.ge(0))
    seed: int = 0
    backend: str = "HIGHS"

    def plan(
        self, problem: Problem, deadline: Deadline, option_table: OptionTable, moves: int
    ) -> tuple[Ints | None, dict[str, int | float | str | bool]]:
        """Plan one level; see `Hierarchical.plan`."""
        graph, budget = problem.graph, problem.budget_nbytes
        groups = self.cut(graph)
        options = option_table.options(groups, self.group_solver(problem, option_table), deadline.share(0.75))
        plans = chain_orders(groups, options, budget, self.slots, deadline)
        order = repair_orders(flatten(graph), plans, budget, deadline, moves)
        return order, {"segments": len(groups), "options": sum(map(len, options))}

    def cut(self, graph: Graph) -> Partition:
        """Cut at articulation points if the graph is a chain of small pieces, else group it."""
        stages = at_articulations(graph, len(graph.ops))
        if all(len(subgraph.ops) <= self.leaf for subgraph in stages.subgraphs):
            return stages if len(stages) <= 2 * self.segments else at_articulations(graph, 2 * self.segments)
        return grouped(graph, self.segments)

    def solve_small(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve as exactly as the size allows."""
        return self.better(problem, deadline, gap=0.0)

    def solve_leaf(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve within a gap of the optimum."""
        return self.better(problem, deadline, gap=GAP)

    def better(self, problem: Problem, deadline: Deadline, *, gap: float) -> Solution:
        """The better result of the exact program and the search; if neither finds any, repaired evictions."""
        found = [Search(moves=self.moves, seed=self.seed).solve(problem, deadline)]
        if len(problem.graph.ops) <= self.exact:
            program = Checkmate(backend=self.backend, gap=gap)
            found.append(program.solve(problem, deadline.within(self.leaf_seconds)))
        if not any(solution.feasible for solution in found):
            arrays = flatten(problem.graph)
            trace = np.arange(len(problem.graph.ops), dtype=np.int64)
            order = repair_orders(arrays, [trace], problem.budget_nbytes, deadline, self.moves)
            found.append(judge(problem, order))
        return min(found, key=lambda solution: inf if solution.time_s is None else solution.time_s)
