"""`griewank`: binomial checkpointing (revolve, treeverse) on the linearized graph.

Griewank & Walther 2000, "Algorithm 799: revolve". A chain of l equal steps whose backward needs each step's
input is reversed with s snapshots: advance from the last snapshot to a place given by binomial coefficients,
take a snapshot, reverse the part after it with one snapshot less, then the part before it. With s snapshots
and at most r runs of a step, chains up to binomial(s + r, s) steps long can be reversed, and this split
minimizes the number of runs.

A graph becomes a chain by cutting its forward where little crosses; a snapshot is the set of values that
crosses. The number of snapshots that the budget allows is not known in advance: every number is tried, from
many to few, and the fastest plan that fits is taken. O(chain length) plans of O(n log n).
"""

from functools import cache
from math import comb
from typing import ClassVar

import attrs

from remat_graph.partition import at_narrow_places
from remat_solvers.chain.table import keep_all, order_of_runs
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge, part_count


@attrs.frozen(kw_only=True)
class Griewank(Rematerializer):
    """Binomial checkpointing.

    Attributes:
        stages: most steps of the chain.
    """

    name: ClassVar[str] = "griewank"
    stages: int = part_count(64)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, arrays = problem.graph, flatten(problem.graph)
        best: tuple[float, list[int], int, int] | None = None
        for stages in sorted({self.stages, self.stages // 2, self.stages // 4} - {0}, reverse=True):
            groups = at_narrow_places(graph, stages)
            options = [[keep_all(groups, s)] for s in range(len(groups))]
            for snapshots in range(len(groups) - 1, 0, -1):
                if deadline.reached():
                    break
                runs = reversal(len(groups), snapshots)
                order = order_of_runs(groups, options, ((kind, step, 0) for kind, step in runs))
                result = evaluate(arrays, order)
                if result.valid and result.peak_nbytes <= problem.budget_nbytes:
                    found = (result.time_s, order, snapshots, len(groups))
                    best = min(best or found, found)
                    break  # fewer snapshots need more runs
        if best is None:
            return judge(problem, None)
        return judge(problem, best[1], stats={"snapshots": best[2], "steps": best[3]})


def reversal(steps: int, snapshots: int) -> tuple[tuple[str, int], ...]:
    """The runs of a chain of `steps`, as ("forward", step) and ("backward", step).

    The input of the chain is always live and is no snapshot; the step right before a backward keeps what that
    backward reads.
    """
    runs: list[tuple[str, int]] = []

    def reverse(first: int, end: int, free: int) -> None:
        if end - first == 1:
            runs.extend([("forward", first), ("backward", first)])
            return
        if free == 0:
            for step in range(end - 1, first - 1, -1):
                runs.extend(("forward", s) for s in range(first, step))
                runs.extend([("forward", step), ("backward", step)])
            return
        middle = first + split(end - first, free)
        runs.extend(("forward", s) for s in range(first, middle))
        reverse(middle, end, free - 1)
        reverse(first, middle, free)

    reverse(0, steps, snapshots)
    return tuple(runs)


def split(steps: int, snapshots: int) -> int:
    """The distance to the next snapshot that leads to the fewest runs."""
    return min(range(1, steps), key=lambda m: m + advances(steps - m, snapshots - 1) + advances(m, snapshots))


@cache
def advances(steps: int, snapshots: int) -> int:
    """The fewest runs of steps that are not directly followed by their backward, in closed form.

    Griewank & Walther 2000, proposition 1: r * l - binomial(s + r, r - 1), with the least r for which
    binomial(s + r, s) >= l. Here s counts the input of the chain as the first snapshot.
    """
    if steps <= 1:
        return 0
    held = snapshots + 1
    repeats = 0
    while comb(held + repeats, held) < steps:
        repeats += 1
    return repeats * steps - comb(held + repeats, repeats - 1)
