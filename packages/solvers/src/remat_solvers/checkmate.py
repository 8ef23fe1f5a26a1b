"""`checkmate`: the integer program of the stage form, solved to proven optimality where time allows.

Jain et al. 2020, "Checkmate: breaking the memory wall with optimal tensor rematerialization". See `stages`
for the program. Exact in its own space (trace order, frontier-advancing stages, an op at most once a
stage); with HiGHS some 30 s at 90 ops, hopeless from some 200.

With ``accounting="checkmate"`` the answer is judged by the paper's memory rule alone, in which nothing but
the outputs of ops counts; the project's own counts scratch and the tangents too. Both drop a value right
after its last use.
"""

from typing import ClassVar

import attrs

from remat_solvers.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution, judge
from remat_solvers.stages import minimize, order_of, stage_program, work_of


@attrs.frozen(kw_only=True)
class Checkmate:
    """The exact program of the stage form.

    Attributes:
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "checkmate"
    backend: str = "HIGHS"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        unplanned = NoRemat().solve(problem)
        if unplanned.feasible:
            return unplanned
        work = work_of(problem.graph)
        program = stage_program(work, problem.budget_nbytes)
        seconds = None if deadline.seconds is None else deadline.remaining_s
        found, bound_s, proven = minimize(program, whole=True, solver=self.backend, seconds=seconds)
        if not proven:
            deadline.reached()
        stats: dict[str, int | float | str | bool] = {"variables": len(program.cost), "proven": proven}
        if found is None:
            return judge(problem, None, stats=stats)
        kept = [pair for pair, column in program.kept.items() if found[column] > 0.5]
        stats["program_overhead_s"] = bound_s
        return judge(problem, order_of(work, kept), stats=stats)
