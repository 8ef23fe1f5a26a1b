"""Sequence annealing: change the list of op runs itself until time runs out.

Idea: with first runs in a valid order, inserting any repeat of an op already run and deleting any repeat
keeps a schedule valid, and the best frees follow from liveness; so a schedule is a list of op ids and the
moves are insert, delete and shift (as in simulated annealing, Kirkpatrick et al. 1983). Single moves get
stuck where recomputed values accumulate, so a move includes its closure (`kernels.moves`): an evicted value
comes back with the producers of its dead inputs, a dropped repeat removes the repeats that only it needed,
sequences of ops are evicted together, one checkpoint is exchanged for another.

The walk minimizes ``seconds + price * excess``, excess being the sum over positions of the bytes above the
budget. The price rises while the budget is exceeded and falls while it holds, so the walk stays near the
border and may pass through sequences that do not fit. The temperature falls from about one mean op time to a
hundredth of it, several times, each time from the best sequence so far; later rounds are longer.

Work is counted in moves, about 1 us at 600 ops since only the lifetimes that a change touches are derived
again (`kernels.incremental`), and most changes are refused before their memory is known. Deterministic for a
seed and a number of moves.

Imperfect: first runs of the forward keep the trace order.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.evaluation.arrays import Ints, evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk, default_moves, shares
from remat_solvers.protocol import Deadline, Problem, Solution, judge, part_count


@attrs.frozen(kw_only=True)
class Search:
    """Anneal from the unplanned sequence, or from a given one.

    Attributes:
        seed: of the random numbers.
        moves: how many changes to try; None for an amount that takes about 2 s at 600 ops.
        rounds: how often the temperature falls.
        hot: first temperature in mean op times.
        cold: last temperature in mean op times.
    """

    name: ClassVar[str] = "search"
    seed: int = 0
    moves: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    rounds: int = part_count(4)
    hot: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    cold: float = attrs.field(default=0.01, validator=attrs.validators.gt(0))

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        arrays = flatten(problem.graph)
        order = np.arange(len(problem.graph.ops), dtype=np.int64)
        if evaluate(arrays, order).peak_nbytes <= problem.budget_nbytes:
            return judge(problem, order.tolist())
        if not len(order):  # nothing to move
            return judge(problem, None)
        moves = default_moves(len(order)) if self.moves is None else self.moves
        best: Ints | None = None
        done = 0
        for i, share in enumerate(shares(self.rounds)):
            walk = AnnealingWalk(
                arrays, order if best is None else best, problem.budget_nbytes, self.seed + i
            )
            found = walk.anneal(round(moves * share), self.hot / 2**i, self.cold, deadline)
            done += walk.tried
            if found is not None:
                best = found
                deadline.report(self.name, evaluate(arrays, best).time_s, problem.graph.time_s)
        return judge(problem, best, stats={"moves": done, "deadline": deadline.hit})
