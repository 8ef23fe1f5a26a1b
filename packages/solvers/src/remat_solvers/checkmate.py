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
from remat_solvers.protocol import Deadline, Problem, Solution
from remat_solvers.stages import solve_whole


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
        return solve_whole(problem, deadline, self.backend)
