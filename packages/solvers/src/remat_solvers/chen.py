"""`chen_sqrt`: sqrt(n) segments.

Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost".

The forward is cut into sqrt(n) segments of equally many ops; only what crosses a cut is kept. When the
backward reaches a segment, the segment runs once more. The paper speaks of chains; here what crosses a cut
is a set of values, skips included, which makes the method valid for any graph. One extra forward at most;
O(n).

The plan does not depend on the budget: it fits or it does not.
"""

import math
from typing import ClassVar

import attrs

from remat_solvers.linear import cut, forward_ops, repeatable, without_useless
from remat_solvers.noremat import NoRemat
from remat_solvers.protocol import Deadline, Problem, Solution, judge


@attrs.frozen(kw_only=True)
class ChenSqrt:
    """Keep what crosses the cuts between sqrt(n) segments.

    Attributes:
        segments: how many; None for the square root of the number of forward ops.
    """

    name: ClassVar[str] = "chen_sqrt"
    segments: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """The one plan of this method, or everything saved where that fits."""
        unplanned = NoRemat().solve(problem)
        if unplanned.feasible:
            return unplanned
        graph = problem.graph
        count = len(forward_ops(graph))
        wanted = min(self.segments or math.isqrt(count) or 1, max(1, count))
        pieces = cut(graph, sorted({round(count * i / wanted) for i in range(1, wanted)} - {0, count}))
        order = [op for run in pieces.forward for op in run]
        for s in range(len(pieces) - 1, -1, -1):
            if s < len(pieces) - 1:  # the backward begins while the last segment is still there
                order += repeatable(graph, pieces.forward[s])
            order += pieces.backward[s]
        return judge(problem, without_useless(graph, order), stats={"segments": len(pieces)})
