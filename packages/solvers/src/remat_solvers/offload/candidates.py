"""Search over orders of ops for a given placement, with a record of all candidates evaluated so far.

For each placement the search tries orders by the activation memory that they may use (`order_frontier`), in
either direction while the time falls. For short graphs it also tries orders all over the range, and from the
best of them single repeats and single swaps are removed.
"""

from collections.abc import Sequence

from remat_solvers.offload.candidate import Candidate, evaluate_candidate
from remat_solvers.offload.order_frontier import OrderFrontier, repeats
from remat_solvers.offload.training_problem import UpdateMode
from remat_solvers.protocol import Deadline, Problem
from remat_solvers.transfers.idle_intervals import IdleInterval
from remat_solvers.transfers.placement import TRANSFER_POLICIES, TransferPolicy

WORTH = 0.02  # of the step time: offloading must save this much if everything fits on the device
CANDIDATE_WORK = 200_000  # candidates times squared ops, for searches that only pay on short orders
ORDER_LEVELS = 40  # orders all over the range
STARTS = 10  # candidates whose repeats and swaps are removed one by one


class CandidateSearch:
    """The candidates evaluated so far, and the best of them.

    Args:
        problem: the training step and its budgets.
        mode: how the step is trained.
        frontier: its orders.
        deadline: limit by the clock.
        most: candidates to evaluate, unless `extend_limit` allows more.
        first_fit: whether the first candidate that keeps both budgets ends the search.

    Attributes:
        best: the fastest candidate that keeps both budgets.
    """

    def __init__(
        self,
        problem: Problem,
        mode: UpdateMode,
        frontier: OrderFrontier,
        deadline: Deadline,
        most: int,
        *,
        first_fit: bool,
    ) -> None:
        self.first_fit = first_fit
        self.problem, self.mode, self.frontier, self.deadline = problem, mode, frontier, deadline
        self.evaluated: dict[tuple[frozenset[int], tuple[int, ...], frozenset[IdleInterval]], Candidate] = {}
        self.best: Candidate | None = None
        self.limit = most
        self.base_s = problem.graph.time_s * mode.micro_batches

    def exhausted(self) -> bool:
        """Whether the search must end; never before the first candidate."""
        return bool(self.evaluated) and (len(self.evaluated) >= self.limit or self.must_stop())

    def must_stop(self) -> bool:
        """Whether the search must end even if nothing was evaluated."""
        return (self.first_fit and self.best is not None) or self.deadline.reached()

    def extend_limit(self) -> None:
        """Allow more candidates, the more the fewer ops there are: cost and number grow with the ops."""
        self.limit = len(self.evaluated) + CANDIDATE_WORK // max(1, len(self.problem.graph.ops)) ** 2

    def overhead_s(self, one: Candidate) -> float:
        """Seconds of repeats and waits."""
        return one.timeline.recomputed_s + sum(one.timeline.waited_s.values())

    def held_nbytes(self, on_host: frozenset[int]) -> int:
        """Bytes placed on the device."""
        values = enumerate(self.problem.graph.values)
        return sum(v.nbytes for i, v in values if v.placement is not None and i not in on_host)

    def explore(
        self, on_host: frozenset[int], activation_nbytes: int | None, steps: tuple[int, ...]
    ) -> Candidate:
        """The best candidate found for this placement."""
        span = self.frontier.top.nbytes - self.frontier.least.nbytes
        if activation_nbytes is None:
            activation_nbytes = self.problem.budget_nbytes - self.held_nbytes(on_host)
        here = self.evaluate(on_host, activation_nbytes)
        policies = TRANSFER_POLICIES if here.policy is None else (here.policy,)
        for parts in steps:
            for side in (-1, 1):
                while not self.exhausted() and (here.fits or side < 0):
                    there_nbytes = here.activation_nbytes + side * max(1, span // parts)
                    there = self.evaluate(on_host, there_nbytes, policies)
                    if not self.better(there, here):
                        break
                    here = there
        return here

    def evaluate(
        self,
        on_host: frozenset[int],
        activation_nbytes: int,
        policies: Sequence[TransferPolicy] = TRANSFER_POLICIES,
    ) -> Candidate:
        """Evaluate the frontier's order for an amount of activation memory."""
        low, high = self.frontier.least.nbytes, self.frontier.top.nbytes
        activation_nbytes = min(high, max(low, activation_nbytes))
        order = self.frontier.at(activation_nbytes).order
        return self.evaluate_order(on_host, order, activation_nbytes, policies)

    def evaluate_order(
        self,
        on_host: frozenset[int],
        order: tuple[int, ...],
        activation_nbytes: int,
        policies: Sequence[TransferPolicy] = TRANSFER_POLICIES,
        pinned_intervals: frozenset[IdleInterval] = frozenset(),
    ) -> Candidate:
        """Evaluate an order with values that stay on the device in the pinned intervals."""
        known = self.evaluated.get((on_host, order, pinned_intervals))
        if known is not None:
            return known
        found = evaluate_candidate(
            self.problem, self.mode, on_host, order, activation_nbytes, policies, pinned_intervals
        )
        self.evaluated[on_host, order, pinned_intervals] = found
        if found.fits and (self.best is None or self.better(found, self.best)):
            self.best = found
            self.deadline.report("offload", found.timeline.time_s, self.base_s)
        return found

    def best_per_placement(self, most: int) -> list[Candidate]:
        """The best candidate of each placement, of the best placements at most `most`."""
        found: dict[frozenset[int], Candidate] = {}
        for one in sorted(self.evaluated.values(), key=self.sort_key):
            found.setdefault(one.on_host, one)
        return list(found.values())[:most]

    def search_orders(self, on_host: frozenset[int]) -> None:
        """Try orders all over the range and improve the best of them; for graphs of few ops."""
        low, high = self.frontier.least.nbytes, self.frontier.top.nbytes
        self.extend_limit()
        for part in range(ORDER_LEVELS, -1, -1):
            if not self.exhausted():
                self.evaluate(on_host, low + (high - low) * part // ORDER_LEVELS)
        starts = [one for one in self.evaluated.values() if one.fits and one.on_host == on_host]
        self.extend_limit()
        for start in sorted(starts, key=self.sort_key)[:STARTS]:
            self.cancel_swaps(self.drop_repeats(start))

    def drop_repeats(self, here: Candidate) -> Candidate:
        """Greedily remove repeats, one at a time, while the candidate improves."""
        before = None
        while here is not before:
            before = here
            for position in repeats(before.order):
                if self.exhausted():
                    return here
                order = before.order[:position] + before.order[position + 1 :]
                here = min(
                    here, self.evaluate_order(here.on_host, order, here.activation_nbytes), key=self.sort_key
                )
        return here

    def cancel_swaps(self, here: Candidate) -> None:
        """Greedily cancel swaps, one value at a time, while the candidate improves."""
        before = None
        while here is not before:
            before = here
            for interval in sorted(before.moves):
                if self.exhausted():
                    return
                pinned_intervals = here.pinned_intervals | {interval}
                there = self.evaluate_order(
                    here.on_host, here.order, here.activation_nbytes, pinned_intervals=pinned_intervals
                )
                here = min(here, there, key=self.sort_key)

    def better(self, one: Candidate, other: Candidate) -> bool:
        """Whether a candidate beats another."""
        return self.sort_key(one) < self.sort_key(other)

    def sort_key(self, one: Candidate) -> tuple[int, float, int]:
        """Lower is better: budget excess in units of 1 % of the device budget, then time, then host bytes."""
        over = max(0, one.over_nbytes) + max(0, one.over_host_nbytes)
        over = -(-over * 100 // max(1, self.problem.budget_nbytes))
        worth = (WORTH if one.on_host else 0.0) * self.base_s
        values = self.problem.graph.values
        return over, one.timeline.time_s + worth, sum(values[v].nbytes for v in one.on_host)
