"""The common parts of methods that solve groups of ops, and groups of groups."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Self

from remat_solvers.chain.block_options import OptionTable
from remat_solvers.evaluation.arrays import Ints
from remat_solvers.local_search.repair import MOVES
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge


class Hierarchical(Rematerializer):
    """A method that cuts a graph into groups, and a large group again.

    Attributes:
        leaf: a graph with at most this many ops is solved directly.
        levels: budgets for what each distinct group keeps.
    """

    leaf: int
    levels: int

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        if len(problem.graph.ops) <= self.leaf:
            return self.solve_small(problem, deadline)
        option_table = OptionTable(levels=self.levels)
        order, stats = self.plan(problem, deadline, option_table, MOVES)
        stats |= {"distinct": option_table.distinct, "solves": option_table.solves, "deadline": deadline.hit}
        return judge(problem, order, stats=stats)

    @abstractmethod
    def solve_small(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve a graph that is not cut into groups."""

    @abstractmethod
    def solve_leaf(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve a group that is not cut into groups."""

    @abstractmethod
    def plan(
        self, problem: Problem, deadline: Deadline, option_table: OptionTable, moves: int
    ) -> tuple[Ints | None, dict[str, int | float | str | bool]]:
        """Plan one level of the hierarchy, with the options found so far and at most `moves` of a repair."""

    def below(self) -> Self:
        """The method for a group that is cut again."""
        return self

    def group_solver(
        self, problem: Problem, option_table: OptionTable
    ) -> Callable[[Problem, Deadline], Solution]:
        """The function that solves one group of a graph at one budget."""

        def solve_group(small: Problem, left: Deadline) -> Solution:
            ops = len(small.graph.ops)
            if ops <= self.leaf or ops >= len(problem.graph.ops):
                return self.solve_leaf(small, left)
            order, _ = self.below().plan(small, left, option_table, 0)
            return judge(small, order)

        return solve_group
