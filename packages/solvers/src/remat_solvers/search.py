"""Sequence annealing: change the list of op runs itself until time runs out.

Idea: with first runs in a valid order, inserting any repeat of an op already run and deleting any repeat
keeps a schedule valid, and the best frees follow from liveness; so a schedule is a list of op ids and the
moves are insert, delete and shift (as in simulated annealing, Kirkpatrick et al. 1983). Single moves get
stuck where rebuilt values pile up, so a move brings its closure along (`kernels_moves`): an evicted value
comes back with the producers of its dead inputs, a dropped repeat takes the repeats that only it needed
with it, stretches of ops are given up together, one checkpoint is exchanged for another.

The walk minimizes ``seconds + price * excess``, excess being the sum over positions of the bytes above the
budget. The price rises while the budget is broken and falls while it holds, so the walk stays near the
border and may pass through sequences that do not fit. The temperature falls from about one mean op time to
a hundredth of it, several times over from the best sequence found; the rounds grow.

Work is counted in moves, each 3 to 10 us at 600 ops since only the lifetimes that a change touches are
derived again (`kernels_state`). Deterministic for a seed and a number of moves.

Imperfect: forward first runs keep the trace order; a carried-out move rebuilds the state in full.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.evaluate import Arrays, Ints, evaluate, flatten
from remat_solvers.protocol import MOST_PARTS, Deadline, Problem, Solution, between, judge

CHUNK = 4_000  # moves between two looks at the clock: Ctrl-C waits no longer than that
# Shares of evict, drop, shift, exchange, evict a run, drop a run, shift a first run.
WEIGHTS = np.cumsum(np.array([0.32, 0.24, 0.08, 0.19, 0.09, 0.05, 0.03]))


@attrs.frozen(kw_only=True)
class Search:
    """Anneal from the unplanned sequence, or from a given one.

    Attributes:
        seed: of the random numbers.
        moves: how many changes to try; None for an amount that takes about 10 s at 600 ops.
        rounds: how often the temperature falls.
        hot: first temperature in mean op times.
        cold: last temperature in mean op times.
    """

    name: ClassVar[str] = "search"
    seed: int = 0
    moves: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    rounds: int = attrs.field(default=4, validator=between(1, MOST_PARTS))
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
            walk = Walk(arrays, order if best is None else best, problem.budget_nbytes, self.seed + i)
            found = walk.anneal(round(moves * share), self.hot / 2**i, self.cold, deadline)
            done += walk.tried
            if found is not None:
                best = found
                deadline.report(self.name, evaluate(arrays, best).time_s, problem.graph.time_s)
        return judge(
            problem, None if best is None else best.tolist(), stats={"moves": done, "deadline": deadline.hit}
        )


def default_moves(ops: int) -> int:
    """Work that takes some 5 s at 600 ops and 20 s from 2,700 on: a move costs more on a longer sequence."""
    return min(1_000_000, 500_000 + 1_000 * ops, 7_300_000_000_000 // max(1, ops * ops))


def shares(rounds: int) -> list[float]:
    """Growing parts of 1: later rounds start from something better."""
    weights = [1.0 + i for i in range(rounds)]
    return [weight / sum(weights) for weight in weights]


class Walk:
    """One annealing walk over the sequences of a graph; keeps the best that fits.

    Attributes:
        tried: changes evaluated so far.
    """

    def __init__(
        self, arrays: Arrays, order: Ints, budget_nbytes: int, seed: int, price: float = 0.3
    ) -> None:
        from remat_solvers import kernels_anneal
        from remat_solvers.state import make_state

        self._kernels = kernels_anneal
        self.budget_nbytes = budget_nbytes
        self.arrays = arrays
        self.state = make_state(arrays, np.asarray(order, np.int64), seed)
        ops = max(1, len(arrays.backward))
        self.mean_s = float(arrays.time[::2].sum()) / ops or 1.0
        sizes = arrays.size[arrays.size > 0]
        mean_nbytes = float(sizes.mean()) if len(sizes) else 1.0
        self.state.meta["best_seconds"] = np.inf
        self.state.meta["price"] = price * self.mean_s / mean_nbytes
        self.state.meta["price_low"] = 1e-3 * price * self.mean_s / mean_nbytes

    @property
    def tried(self) -> int:
        """Changes evaluated."""
        return int(self.state.meta["tried"])

    @property
    def best(self) -> Ints | None:
        """The fastest sequence found that fits."""
        if not np.isfinite(self.state.meta["best_seconds"]):
            return None
        best: Ints = self.state.pos["best"][: int(self.state.meta["best_count"])].copy()
        return best

    def reach(self, moves: int, hot: float, cold: float, deadline: Deadline) -> Ints | None:
        """As `anneal`, but end soon after the first sequence that fits."""
        return self.anneal(moves, hot, cold, deadline, enough=True)

    def anneal(
        self, moves: int, hot: float, cold: float, deadline: Deadline, *, enough: bool = False
    ) -> Ints | None:
        """Let the temperature fall once.

        Args:
            moves: changes to try.
            hot: first temperature in mean op times.
            cold: last one.
            deadline: looked at between chunks.
            enough: whether any sequence that fits is enough.
        """
        chunks = max(1, -(-moves // CHUNK))
        for i in range(chunks):
            if deadline.reached() or (enough and self.best is not None):
                break
            begin = hot * (cold / hot) ** (i / chunks) * self.mean_s
            end = hot * (cold / hot) ** ((i + 1) / chunks) * self.mean_s
            self._kernels.anneal(self.state, self.budget_nbytes, CHUNK, begin, end, WEIGHTS, 1.05)
        return self.best
