"""Simulated annealing of an order of ops; `methods.annealing` says by which moves, and for what."""

from collections.abc import Iterable

import numpy as np

from remat_solvers.evaluation.arrays import Arrays, Ints
from remat_solvers.evaluation.switch_arrays import SwitchArrays
from remat_solvers.protocol import Deadline

# Moves between two checks of the deadline, which Ctrl-C waits for: a hundredth of a second up to 600 ops.
# Shorter chunks wait more for Python's lock where another thread runs Python. Large graphs have fewer moves,
# but not fewer than the second number.
CHUNK, LEAST_CHUNK = 10_000, 2_000

FULL_OPS = 600  # of the largest graph on which a short walk gets all of its moves
SMALL_OPS = 300  # smaller graphs get less work in all

COLD = 0.01  # the usual last temperature, in mean op times

FLIPS = 0.02  # share of the changes that flip switches, where there are any

# Shares of evict, drop, shift, exchange, evict a run, drop a run, shift a first run.
WEIGHTS = np.cumsum(np.array([0.32, 0.24, 0.08, 0.19, 0.09, 0.05, 0.03]))


def default_moves(ops: int) -> int:
    """Work that takes about 2 s at 600 ops and 7 s from 2,700 on: a move costs more on a longer sequence.

    Below 300 ops in proportion: on six graphs of 37 to 134 ops, two thirds of the time found as good plans.
    """
    most = min(1_000_000, 500_000 + 1_000 * ops, 7_300_000_000_000 // max(1, ops * ops))
    return round(most * min(1.0, ops / SMALL_OPS))


def fewer_moves(moves: int, ops: int) -> int:
    """Fewer of them on a graph above `FULL_OPS`, in proportion, because a move takes longer there."""
    return round(moves * min(1.0, FULL_OPS / max(1, ops)))


def shares(rounds: int) -> list[float]:
    """Increasing parts of 1, so that later rounds, which start from better sequences, get more work."""
    weights = [1.0 + i for i in range(rounds)]
    return [weight / sum(weights) for weight in weights]


class AnnealingWalk:
    """One annealing walk over the sequences of a graph, which keeps the best that fits."""

    def __init__(
        self,
        arrays: Arrays,
        order: Ints,
        budget_nbytes: int,
        seed: int,
        price: float = 0.3,
        *,
        choice: SwitchArrays | None = None,
        on: Iterable[str] = (),
    ) -> None:
        from remat_solvers.evaluation.search_state import make_state
        from remat_solvers.kernels import anneal

        self._kernels = anneal
        self.budget_nbytes = budget_nbytes
        self.arrays = arrays
        self.choice = choice
        self.state = make_state(arrays, np.asarray(order, np.int64), seed, choice)
        ops = max(1, len(arrays.backward))
        first_runs = arrays.time[::2] if choice is None else arrays.time[choice.first_row]
        self.mean_s = float(first_runs.sum()) / ops or 1.0
        sizes = arrays.size[arrays.size > 0]
        mean_nbytes = float(sizes.mean()) if len(sizes) else 1.0
        self.state.meta["best_seconds"] = np.inf
        self.state.meta["price"] = price * self.mean_s / mean_nbytes
        self.state.meta["price_low"] = 1e-3 * price * self.mean_s / mean_nbytes
        if choice is not None:
            from remat_solvers.kernels.switch import set_switches

            set_switches(self.state, np.array([name in on for name in choice.names], np.int64))

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

    @property
    def now(self) -> Ints:
        """The sequence where the walk is, which may not fit."""
        order: Ints = self.state.pos["order"][: int(self.state.meta["count"])].copy()
        return order

    @property
    def best_on(self) -> frozenset[str]:
        """The switches that are on in the fastest sequence found that fits."""
        return self._on("best_now")

    @property
    def now_on(self) -> frozenset[str]:
        """The switches that are on where the walk is."""
        return self._on("now")

    def _on(self, field: str) -> frozenset[str]:
        if self.choice is None:
            return frozenset()
        now, changes = self.state.ops[field], zip(self.choice.ops, self.choice.rows, strict=True)
        inside = [all(now[op] == row for op, row in zip(*each, strict=True)) for each in changes]
        return frozenset(name for name, on in zip(self.choice.names, inside, strict=True) if on)

    def reach(self, moves: int, hot: float, cold: float, deadline: Deadline) -> Ints | None:
        """Like `anneal`, but end soon after the first sequence that fits."""
        return self.anneal(moves, hot, cold, deadline, enough=True)

    def anneal(
        self, moves: int, hot: float, cold: float, deadline: Deadline, *, enough: bool = False
    ) -> Ints | None:
        """Try `moves` changes while the temperature falls from `hot` to `cold`, in mean op times.

        If `enough`, any sequence that fits ends the walk.
        """
        chunk = max(LEAST_CHUNK, fewer_moves(CHUNK, len(self.arrays.backward)))
        chunks = max(1, -(-moves // chunk))
        each = -(-moves // chunks)
        flips = 0.0 if self.choice is None else FLIPS
        for i in range(chunks):
            if deadline.reached() or (enough and self.best is not None):
                break
            begin = hot * (cold / hot) ** (i / chunks) * self.mean_s
            end = hot * (cold / hot) ** ((i + 1) / chunks) * self.mean_s
            self._kernels.anneal(self.state, self.budget_nbytes, each, begin, end, WEIGHTS, 1.05, flips)
        return self.best
