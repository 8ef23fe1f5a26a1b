"""`moccasin`: retention intervals, at most C computations of a value.

Bartan, Lu, Ghaffari, Teague, Lee, Wu 2023, "Moccasin: efficient tensor rematerialization for neural
networks". A value is live in at most C intervals, each opened by one computation of it. Two forms of the same
space (first runs in trace order, an op at most once a stage):

* a mixed-integer program, the stage form of `mip.stage_program`, in which an interval is a run followed by
  stages in which the value is kept, with one more row per op: it runs at most C times;
* the paper's own form for a constraint solver, see `mip.cp_sat`: ``backend="CP-SAT"``, with the extra
  ``remat-solvers[cpsat]``.

With C = 2, which the paper finds enough in practice, most of the program's branching disappears: it usually
proves optimality sooner than `checkmate`, in a slightly smaller space.
"""

from typing import ClassVar

import attrs

from remat_solvers.methods.base import Rematerializer
from remat_solvers.mip.cp_sat import solve_intervals
from remat_solvers.mip.cvxpy_backend import solve_whole
from remat_solvers.protocol import Deadline, Problem, Solution


@attrs.frozen(kw_only=True)
class Moccasin(Rematerializer):
    """Plans of stages with a limit on the runs of an op.

    Attributes:
        computations: most runs of an op, the first one included: the paper's C.
        backend: name of a mixed-integer solver that cvxpy has installed, or "CP-SAT", which needs the extra
            ``cpsat``.
    """

    name: ClassVar[str] = "moccasin"
    computations: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        if self.backend == "CP-SAT":
            return solve_intervals(problem, deadline, self.computations)
        return solve_whole(problem, deadline, self.backend, computations=self.computations)
