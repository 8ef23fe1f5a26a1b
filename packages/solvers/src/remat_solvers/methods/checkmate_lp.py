"""`checkmate_lp`: the linear relaxation of the stage form, rounded in two phases and repaired.

Jain et al. 2020, section 5: solve the program of `mip.stage_program` without integrality, round the *kept*
values (S) at a threshold, and compute the fewest runs (R) for them. A rounded plan may exceed the budget:
here every threshold is tried, each plan's peak is checked, and the best one that fits is taken; if none fits,
values are evicted from the closest one until it does. One LP, then O(n^2) a threshold.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.evict import evict
from remat_solvers.methods.base import Rematerializer
from remat_solvers.mip.cvxpy_backend import minimize_with_cvxpy, order_of
from remat_solvers.mip.stage_program import DeadlineReached, stage_program, staged_step
from remat_solvers.protocol import Deadline, Problem, Solution, judge

THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9, 0.99)


@attrs.frozen(kw_only=True)
class CheckmateLP(Rematerializer):
    """The relaxation and its rounding.

    Attributes:
        backend: name of a linear solver that cvxpy has installed.
    """

    name: ClassVar[str] = "checkmate_lp"
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, budget = problem.graph, problem.budget_nbytes
        work = staged_step(graph)
        try:
            program = stage_program(work, budget, deadline)
        except DeadlineReached:
            return judge(problem, None)
        found, bound_s, proven = minimize_with_cvxpy(
            program, whole=False, solver=self.backend, deadline=deadline
        )
        stats: dict[str, int | float | str | bool] = {"variables": len(program.cost), "proven": proven}
        if found is None:
            return judge(problem, None, stats=stats)
        stats["relaxation_s"] = bound_s
        arrays = flatten(graph)
        rounded = []
        for threshold in THRESHOLDS:
            kept = [pair for pair, column in program.kept.items() if found[column] > threshold]
            order = np.array(order_of(work, kept), np.int64)
            result = evaluate(arrays, order)
            if result.valid:
                rounded.append((result.peak_nbytes > budget, result.time_s, result.peak_nbytes, order))
        fitting = [entry for entry in rounded if not entry[0]]
        if fitting:
            return judge(problem, min(fitting, key=lambda entry: entry[1])[3].tolist(), stats=stats)
        if not rounded:
            return judge(problem, None, stats=stats)
        closest = min(rounded, key=lambda entry: entry[2])[3]
        return judge(
            problem, evict(arrays, budget, deadline, closest).tolist(), stats={**stats, "repaired": True}
        )
