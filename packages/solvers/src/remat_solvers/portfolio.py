"""`auto`: runs the methods on one problem and returns the best schedule the referee accepts."""

from typing import ClassVar

import attrs

from remat_solvers.greedy import Greedy
from remat_solvers.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution


@attrs.frozen
class Auto:
    """The portfolio."""

    name: ClassVar[str] = "auto"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        solution = NoRemat().solve(problem, deadline)
        return solution if solution.feasible else Greedy().solve(problem, deadline)
