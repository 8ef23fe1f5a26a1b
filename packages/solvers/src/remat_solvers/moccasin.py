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
from remat_solvers.protocol import Deadline, Problem, Solution, judge
from remat_solvers.stages import minimize, order_of, stage_program, work_of


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
        work = work_of(problem.graph)
        program = stage_program(work, problem.budget_nbytes, computations=self.computations)
        seconds = None if deadline.seconds is None else deadline.remaining_s
        found, bound_s, proven = minimize(program, whole=True, solver=self.backend, seconds=seconds)
        if not proven:
            deadline.reached()
        stats: dict[str, int | float | str | bool] = {"variables": len(program.cost), "proven": proven}
        if found is None:
            return judge(problem, None, stats=stats)
        stats["program_overhead_s"] = bound_s
        kept = [pair for pair, column in program.kept.items() if found[column] > 0.5]
        return judge(problem, order_of(work, kept), stats=stats)
