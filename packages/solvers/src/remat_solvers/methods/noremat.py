"""Save everything: every op runs once, in trace order.

The fastest schedule with the largest peak; budgets in percent refer to it. One evaluation.
"""

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
