"""`checkmate`: the integer program of the stage form, solved to proven optimality where time allows.

Jain et al. 2020, "Checkmate: breaking the memory wall with optimal tensor rematerialization". See `stages`
for the program. Exact in its own space (trace order, frontier-advancing stages, an op at most once a
stage); with HiGHS some 30 s at 90 ops, hopeless from some 200.

Memory is counted as the referee does: the paper's rule (an op's output comes live, what is not needed again
goes) with scratch, tangents and several outputs an op beside it. On layer-level graphs both agree.
"""

from typing import ClassVar

import attrs

from remat_solvers.noremat import Rematerializer
from remat_solvers.programs import solve_whole
from remat_solvers.protocol import Deadline, Problem, Solution


@attrs.frozen(kw_only=True)
class Checkmate(Rematerializer):
    """The exact program of the stage form.

    Attributes:
        backend: name of a mixed-integer solver that cvxpy has installed.
        gap: how far from the fewest repeats is near enough, as a ratio of their seconds.
    """

    name: ClassVar[str] = "checkmate"
    backend: str = "HIGHS"
    gap: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        return solve_whole(problem, deadline, self.backend, gap=self.gap)
