"""The common base of methods that recompute."""

from abc import ABC, abstractmethod

from remat_solvers.methods.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution


class Rematerializer(ABC):
    """A method for budgets below the peak of the step that saves everything."""

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Save everything if that fits, else `recompute`."""
        unplanned = NoRemat().solve(problem)
        return unplanned if unplanned.feasible else self.recompute(problem, deadline or Deadline())

    @abstractmethod
    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """Find a schedule that recomputes some values."""
