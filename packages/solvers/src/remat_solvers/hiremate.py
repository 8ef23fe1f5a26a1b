"""`hiremate`: a hierarchy of segments, each planned by the method that suits it.

After HiRemate (hierarchical rematerialization): a graph that is too large for the good solvers is cut into
segments where little crosses, each segment becomes a graph of its own and is solved at several budgets,
again by cutting it if it is still too large, and the table of `chain_dp` chooses among what comes back.
Small graphs go to the integer program of `checkmate` and to the sequence search, and the better answer
counts; so a level that is a chain is planned by rotor's program, and a leaf exactly where that is
affordable. The whole is polished at the end. Equal segments are solved once.
"""

from math import inf
from typing import ClassVar

import attrs

from remat_solvers.blocks import menus
from remat_solvers.chain_dp import ChainTable, fastest_that_fits
from remat_solvers.checkmate import Checkmate
from remat_solvers.evaluate import flatten
from remat_solvers.interval_dp import narrow_places
from remat_solvers.linear import cut
from remat_solvers.noremat import Rematerializer
from remat_solvers.polish import polish
from remat_solvers.protocol import Deadline, Problem, Solution, judge, positive_or_none
from remat_solvers.search import Search


@attrs.frozen(kw_only=True)
class Hiremate(Rematerializer):
    """Segments of segments, chosen from menus.

    Attributes:
        segments: most segments of one level.
        leaf: a graph of at most so many ops is not cut.
        exact: a graph of at most so many ops is also given to the integer program.
        slots: memory levels of a table.
        levels: budgets at which each distinct segment is solved.
        leaf_seconds: limit by the clock for the integer program of one leaf at one budget; None for none.
        moves: of the search in one leaf.
        seed: of the search.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "hiremate"
    segments: int = attrs.field(default=16, validator=attrs.validators.ge(2))
    leaf: int = attrs.field(default=80, validator=attrs.validators.ge(2))
    exact: int = attrs.field(default=40, validator=attrs.validators.ge(0))
    slots: int = attrs.field(default=400, validator=attrs.validators.ge(2))
    levels: int = attrs.field(default=6, validator=attrs.validators.ge(1))
    leaf_seconds: float | None = attrs.field(default=5.0, validator=positive_or_none)
    moves: int = attrs.field(default=20_000, validator=attrs.validators.ge(0))
    seed: int = 0
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph = problem.graph
        if len(graph.ops) <= self.leaf:
            return self.solve_leaf(problem, deadline)
        arrays, budget = flatten(graph), problem.budget_nbytes
        pieces = cut(graph, narrow_places(graph, self.segments))
        options = menus(graph, pieces, self.solve_segment(len(graph.ops)), self.levels, None, deadline)
        table = ChainTable(graph, pieces, options, budget, self.slots)
        order = fastest_that_fits(graph, arrays, table, budget)
        stats: dict[str, int | float | str | bool] = {
            "segments": len(pieces),
            "options": sum(map(len, options)),
            "deadline": deadline.hit,
        }
        if order is not None:
            order = polish(arrays, order, budget, deadline)
        return judge(problem, None if order is None else order.tolist(), stats=stats)

    def solve_segment(self, above: int) -> "_Segment":
        """How a segment of a graph of `above` ops is solved: cutting must have made it smaller."""
        return _Segment(self, above)

    def solve_leaf(self, problem: Problem, deadline: Deadline) -> Solution:
        """The better of the exact program and the search."""
        found = [Search(moves=self.moves, seed=self.seed).solve(problem, deadline)]
        if len(problem.graph.ops) <= self.exact:
            found.append(Checkmate(backend=self.backend).solve(problem, deadline.within(self.leaf_seconds)))
        return min(found, key=lambda solution: inf if solution.time_s is None else solution.time_s)


@attrs.frozen
class _Segment:
    method: Hiremate
    above: int

    def __call__(self, problem: Problem, deadline: Deadline) -> Solution:
        if len(problem.graph.ops) >= self.above:
            return self.method.solve_leaf(problem, deadline)
        return self.method.solve(problem, deadline)
