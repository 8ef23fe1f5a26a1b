"""`auto`, the portfolio: what a user gets.

In this order, each start only if the gap to the lower bound is still open: save everything; the floor, which may
prove that nothing fits; the cut bound; greedy eviction and interval DP, which give a first valid schedule soon; then
rounds of sequence annealing from the best starts until the gap closes or the work is used up. A candidate counts only
with the referee's word, so a method that returns nonsense loses its place and nothing else.

Deterministic for a seed and an amount of work, unless the deadline cuts in.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.cut import CutBound
from remat_solvers.evaluate import Arrays, Ints, evaluate, flatten
from remat_solvers.greedy import evict
from remat_solvers.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution, Status, judge
from remat_solvers.search import Walk, default_moves


@attrs.frozen(kw_only=True)
class Auto:
    """The portfolio.

    Attributes:
        seed: of the search's random numbers.
        moves: changes that the search may try in all; None for an amount that takes about 10 s at 500 ops.
        gap: stop when the overhead is within this ratio of base time from the lower bound.
    """

    name: ClassVar[str] = "auto"
    seed: int = 0
    moves: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    gap: float = attrs.field(default=0.002, validator=attrs.validators.ge(0))

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        unplanned = NoRemat().solve(problem)
        if unplanned.feasible:
            return attrs.evolve(unplanned, stats={"method": "noremat"})
        graph, budget = problem.graph, problem.budget_nbytes
        floor = budget_floor(graph)
        if budget < floor.nbytes:
            stats = {"method": "floor", "floor_nbytes": floor.nbytes, "floor_op": floor.op}
            return attrs.evolve(unplanned, status=Status.INFEASIBLE, lower_bound_s=float("inf"), stats=stats)
        return _Run(self, problem, deadline, flatten(graph)).solve()


class _Run:
    """One solve: the best order so far and how it came about."""

    def __init__(self, settings: Auto, problem: Problem, deadline: Deadline, arrays: Arrays) -> None:
        self.settings, self.problem, self.deadline, self.arrays = settings, problem, deadline, arrays
        self.base_s = problem.graph.time_s
        self.bound_s = self.base_s
        self.best: Ints | None = None
        self.best_s = float("inf")
        self.method = ""
        self.moves = 0

    def solve(self) -> Solution:
        starts: list[Ints] = [np.arange(len(self.arrays.backward), dtype=np.int64)]
        evicted = evict(self.arrays, self.problem.budget_nbytes, self.deadline)
        starts.append(evicted)
        self.offer(evicted, "greedy")
        self.bound_s += CutBound(self.problem.graph).extra_s(self.problem.budget_nbytes, self.deadline)
        self.search(starts)
        stats = {"method": self.method, "moves": self.moves, "deadline": self.deadline.hit}
        order = None if self.best is None else self.best.tolist()
        return judge(self.problem, order, lower_bound_s=self.bound_s, stats=stats)

    def closed(self) -> bool:
        return self.best_s - self.bound_s <= self.settings.gap * self.base_s

    def offer(self, order: Ints | None, method: str) -> None:
        """Take an order if it is valid, fits and is faster than the best."""
        if order is None:
            return
        result = evaluate(self.arrays, order)
        if result.valid and result.peak_nbytes <= self.problem.budget_nbytes and result.time_s < self.best_s:
            self.best, self.best_s, self.method = order, result.time_s, method
            self.deadline.report(method, self.best_s, self.bound_s)

    def search(self, starts: list[Ints]) -> None:
        """Short walks from every start, then longer ones from the best."""
        moves = (
            default_moves(len(self.arrays.backward)) if self.settings.moves is None else self.settings.moves
        )
        plan = [(start, 0.1, 1.0) for start in starts] + [
            (None, 0.25, 0.5),
            (None, 0.3, 0.3),
            (None, 0.25, 0.15),
        ]
        for i, (start, share, hot) in enumerate(plan):
            if self.closed() or self.deadline.reached():
                return
            order = start if start is not None else self.best if self.best is not None else starts[-1]
            walk = Walk(self.arrays, order, self.problem.budget_nbytes, self.settings.seed + i)
            self.offer(walk.anneal(round(moves * share), hot, 0.01, self.deadline), "search")
            self.moves += walk.tried
