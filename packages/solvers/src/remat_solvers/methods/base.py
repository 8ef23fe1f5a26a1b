"""What methods that recompute have in common."""

from abc import ABC, abstractmethod

from remat_solvers.methods.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution


class Rematerializer(ABC):
    """A method for budgets that saving everything does not keep."""

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Save everything where that fits, else `recompute`."""
        unplanned = NoRemat().solve(problem)
        return unplanned if unplanned.feasible else self.recompute(problem, deadline or Deadline())

    @abstractmethod
    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """Find a schedule that runs some ops again."""
