"""What was tried of one search for a plan that moves, and the best of it: orders of ops at given homes.

For a choice of homes, orders by the budget that they leave to activations (`order_frontier`), in either
direction while that is faster. Where attempts are cheap, orders all over the range, and of the best ones
single repeats and single moves left out.
"""

from collections.abc import Sequence

from remat_solvers.offload.candidate import Attempt, attempt
from remat_solvers.offload.order_frontier import Ladder, repeats
from remat_solvers.offload.training_problem import Style
from remat_solvers.protocol import Deadline, Problem
from remat_solvers.transfers.idle_intervals import Gap
from remat_solvers.transfers.placement import WAYS, Way

WORTH = 0.02  # of a step's time, for which parameters and states leave a device that has room for them all
TRIALS = 200_000  # attempts times squared ops, for what is only worth it on short orders
RUNGS = 40  # orders all over the range, of these
STARTS = 10  # orders whose moves are thinned


class Trials:
    """Attempts and the best of them.

    Args:
        problem: the training step and its budgets.
        style: how it is trained.
        ladder: its orders.
        deadline: limit by the clock.
        most: attempts, unless more are allowed later.
        any_will_do: whether the first one that keeps both budgets ends the search.

    Attributes:
        best: the fastest attempt that keeps both budgets.
    """

    def __init__(
        self,
        problem: Problem,
        style: Style,
        ladder: Ladder,
        deadline: Deadline,
        most: int,
        *,
        any_will_do: bool = False,
    ) -> None:
        self.any_will_do = any_will_do
        self.problem, self.style, self.ladder, self.deadline = problem, style, ladder, deadline
        self.tried: dict[tuple[frozenset[int], tuple[int, ...], frozenset[Gap]], Attempt] = {}
        self.best: Attempt | None = None
        self.limit = most
        self.base_s = problem.graph.time_s * style.micro_batches

    def over(self) -> bool:
        """Whether the search must end; never before the first attempt."""
        return bool(self.tried) and (len(self.tried) >= self.limit or self.done())

    def done(self) -> bool:
        """Whether no more is to be tried, however little was."""
        return (self.any_will_do and self.best is not None) or self.deadline.reached()

    def allow_more(self) -> None:
        """Let more be tried, the more the fewer ops there are: both attempts and choices grow with them."""
        self.limit = len(self.tried) + TRIALS // max(1, len(self.problem.graph.ops)) ** 2

    def lost_s(self, one: Attempt) -> float:
        """Seconds of repeats and waits."""
        return one.timeline.recomputed_s + sum(one.timeline.waited_s.values())

    def held_nbytes(self, on_host: frozenset[int]) -> int:
        """Bytes placed on the device."""
        values = enumerate(self.problem.graph.values)
        return sum(v.nbytes for i, v in values if v.placement is not None and i not in on_host)

    def explore(
        self, on_host: frozenset[int], activation_nbytes: int | None, steps: tuple[int, ...]
    ) -> Attempt:
        """The best attempt found at these homes."""
        span = self.ladder.top.nbytes - self.ladder.least.nbytes
        if activation_nbytes is None:
            activation_nbytes = self.problem.budget_nbytes - self.held_nbytes(on_host)
        here = self.attempt(on_host, activation_nbytes)
        ways = WAYS if here.way is None else (here.way,)  # which is best goes with what is away
        for parts in steps:
            for side in (-1, 1):
                while not self.over() and (here.fits or side < 0):
                    there_nbytes = here.activation_nbytes + side * max(1, span // parts)
                    there = self.attempt(on_host, there_nbytes, ways)
                    if not self.better(there, here):
                        break
                    here = there
        return here

    def attempt(self, on_host: frozenset[int], activation_nbytes: int, ways: Sequence[Way] = WAYS) -> Attempt:
        """Try one order."""
        low, high = self.ladder.least.nbytes, self.ladder.top.nbytes
        activation_nbytes = min(high, max(low, activation_nbytes))
        order = self.ladder.at(activation_nbytes).order
        return self.attempt_order(on_host, order, activation_nbytes, ways)

    def attempt_order(
        self,
        on_host: frozenset[int],
        order: tuple[int, ...],
        activation_nbytes: int,
        ways: Sequence[Way] = WAYS,
        stay: frozenset[Gap] = frozenset(),
    ) -> Attempt:
        """Try an order, nothing being away in some of its gaps."""
        known = self.tried.get((on_host, order, stay))
        if known is not None:
            return known
        found = attempt(self.problem, self.style, on_host, order, activation_nbytes, ways, stay)
        self.tried[on_host, order, stay] = found
        if found.fits and (self.best is None or self.better(found, self.best)):
            self.best = found
            self.deadline.report("offload", found.timeline.time_s, self.problem.graph.time_s)
        return found

    def leaders(self, most: int) -> list[Attempt]:
        """The best attempts of the best choices of homes, one of each."""
        found: dict[frozenset[int], Attempt] = {}
        for one in sorted(self.tried.values(), key=self.rank):
            found.setdefault(one.on_host, one)
        return list(found.values())[:most]

    def deepen(self, on_host: frozenset[int]) -> None:
        """Try orders all over the range, and go on from the best of them; for steps of few ops."""
        low, high = self.ladder.least.nbytes, self.ladder.top.nbytes
        self.allow_more()
        for part in range(RUNGS, -1, -1):
            if not self.over():
                self.attempt(on_host, low + (high - low) * part // RUNGS)
        starts = [one for one in self.tried.values() if one.fits and one.on_host == on_host]
        self.allow_more()
        for start in sorted(starts, key=self.rank)[:STARTS]:
            self.thin(self.repeat_less(start))

    def repeat_less(self, here: Attempt) -> Attempt:
        """Leave out one repeat after the other, as long as that is better: what it made is kept or moved."""
        before = None
        while here is not before:
            before = here
            for position in repeats(before.order):
                if self.over():
                    return here
                order = before.order[:position] + before.order[position + 1 :]
                here = min(
                    here, self.attempt_order(here.on_host, order, here.activation_nbytes), key=self.rank
                )
        return here

    def thin(self, here: Attempt) -> None:
        """Let one value after the other stay where it may be away, as long as that is better."""
        before = None
        while here is not before:
            before = here
            for gap in sorted(before.moves):
                if self.over():
                    return
                stay = here.stay | {gap}
                there = self.attempt_order(here.on_host, here.order, here.activation_nbytes, stay=stay)
                here = min(here, there, key=self.rank)

    def better(self, one: Attempt, other: Attempt) -> bool:
        """Whether an attempt beats another: by what it is above the budgets, then by time."""
        return self.rank(one) < self.rank(other)

    def rank(self, one: Attempt) -> tuple[int, float, int]:
        """What is to be small; what is above a budget, in steps of a hundredth of the device's."""
        over = max(0, one.over_nbytes) + max(0, one.over_host_nbytes)
        over = -(-over * 100 // max(1, self.problem.budget_nbytes))
        worth = (WORTH if one.on_host else 0.0) * self.base_s
        values = self.problem.graph.values
        return over, one.timeline.time_s + worth, sum(values[v].nbytes for v in one.on_host)
