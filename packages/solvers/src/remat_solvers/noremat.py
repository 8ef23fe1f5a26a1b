"""Save everything: every op runs once, in trace order.

The fastest schedule there is, and the largest peak: budgets in percent refer to it. One evaluation. The
methods that recompute derive from `Rematerializer`, which tries this first.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import attrs

from remat_solvers.protocol import Deadline, Problem, Solution, judge


@attrs.frozen
class NoRemat:
    """The schedule without repeats."""

    name: ClassVar[str] = "noremat"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Trace order, if it fits."""
        return judge(problem, range(len(problem.graph.ops)))


class Rematerializer(ABC):
    """A method for budgets that saving everything does not keep."""

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Save everything where that fits, else `recompute`."""
        unplanned = NoRemat().solve(problem)
        return unplanned if unplanned.feasible else self.recompute(problem, deadline or Deadline())

    @abstractmethod
    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """Find a schedule that runs some ops again."""
