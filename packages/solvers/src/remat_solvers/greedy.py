"""Greedy eviction: at the worst moment, give up the value that is cheapest to make again per byte.

First version: one value at a time, with the producers of its dead inputs.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.evaluate import Arrays, evaluate, flatten
from remat_solvers.protocol import Deadline, Problem, Solution, judge


@attrs.frozen
class Greedy:
    """Evict by seconds per byte until the budget holds."""

    name: ClassVar[str] = "greedy"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        arrays = flatten(problem.graph)
        order = list(range(len(problem.graph.ops)))
        for _ in range(20 * len(order)):
            result = evaluate(arrays, order)
            if result.peak_nbytes <= problem.budget_nbytes:
                return judge(problem, order)
            if deadline.reached():
                break
            worst = int(np.argmax(result.profile))
            better = _evict(arrays, order, worst, sum(np.maximum(result.profile - problem.budget_nbytes, 0)))
            if better is None:
                break
            order = better
        return judge(problem, None)


def _evict(arrays: Arrays, order: list[int], worst: int, excess: int) -> list[int] | None:
    return None
