"""`moccasin`: retention intervals, at most C computations of a value.

Bartan, Lu, Ghaffari, Teague, Lee, Wu 2023, "Moccasin: efficient tensor rematerialization for neural
networks". A value is live in at most C intervals, each opened by one computation of it. The paper states
this for a constraint solver; here it is a mixed-integer program: the stage form of `stages`, in which an
interval is a run followed by stages in which the value is kept, with one more row an op: it runs at most C
times. With C = 2, which the paper finds enough in practice, most of the program's branching is gone: as a
rule it proves optimality sooner than `checkmate`, of a space that is a little smaller.
"""

from typing import ClassVar

import attrs

from remat_solvers.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution
from remat_solvers.stages import solve_whole


@attrs.frozen(kw_only=True)
class Moccasin:
    """The stage form with at most so many runs of an op.

    Attributes:
        computations: most runs of an op, the first one included: the paper's C.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "moccasin"
    computations: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    backend: str = "HIGHS"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        unplanned = NoRemat().solve(problem)
        if unplanned.feasible:
            return unplanned
        return solve_whole(problem, deadline, self.backend, computations=self.computations)
