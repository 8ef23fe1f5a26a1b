"""The table of `pofo`: along a chain, what is kept, what is offloaded and what is recomputed.

A plan cuts the chain into segments. A segment of one stage may be kept whole: everything that its backward
reads stays. Any other segment keeps its input alone, and its backward is `table`'s best one for the bytes
that are free. Of the values that a segment holds between the two, some stay on the device and the others are
copied to the host and back.

Forward and backward are symmetric: from the first stage on, values join a queue to the host after their
forward; backwards from the end of the step, values join a queue to the device after their backward. A label
stands for the segments up to a stage: seconds lost so far, bytes that stay, and both queues, value by value;
where a stage does not fit in addition to the values in a queue, it waits for copies. In the middle the queues
meet. Of the labels that end at one stage only those are kept that no other dominates in time, bytes and
queues, rounded until they are few enough. So the table is exact in the cost and memory of a segment, and an
estimate of how the two lanes overlap with compute. O(stages^2 * labels) numpy rows.
"""

from collections.abc import Iterator
from itertools import combinations

import attrs
import numpy as np

from remat_graph import Links
from remat_solvers.chain.offload_labels import (
    FIELDS,
    Labels,
    drain,
    held,
    in_both_queues,
    join,
    undominated,
    waits,
)
from remat_solvers.chain.table import ChainTable, GroupRun
from remat_solvers.evaluation.arrays import Floats
from remat_solvers.protocol import Deadline, Problem

PARTS = 3  # parts of a stage's values that move separately: the largest values, and the remainder
DRAINED = (0.0, 0.5, 1.0)  # parts of a queue that may be waited for before a segment is recomputed
KEPT = -1


@attrs.frozen(kw_only=True)
class SegmentPlacement:
    """Which of the values that a segment holds are offloaded."""

    moved: frozenset[int]  # values that are offloaded
    kept_nbytes: int  # bytes of the values that stay
    input_nbytes: int  # offloaded bytes of its input, which exists before its forward
    own_nbytes: tuple[int, ...]  # offloaded bytes of its own values, part by part


@attrs.frozen(kw_only=True)
class ChainPlan:
    """One plan of the table."""

    runs: tuple[GroupRun, ...]  # runs of groups, see `table`
    moved: frozenset[int]  # values that are on the host between their forward and their backward
    lost_s: float  # seconds of repeats and waits, by estimate

    def moves_more_than(self, other: "ChainPlan") -> bool:
        """Whether it offloads more than another plan to the same effect."""
        return (self.runs, self.lost_s) == (other.runs, other.lost_s) and self.moved >= other.moved


class PofoTable:
    """Labels per cut, at most `most` a stage, and the plans of the labels at the end.

    Plans that lose more than `worth_s` seconds are of no interest; past the deadline there are no plans.

    Attributes:
        labels: per cut, the remaining labels.
    """

    def __init__(
        self, table: ChainTable, problem: Problem, links: Links, most: int, worth_s: float, deadline: Deadline
    ) -> None:
        self.table, self.chain, self.groups = table, table.chain, table.groups
        self.budget, self.host_budget = problem.budget_nbytes, problem.host_budget_nbytes
        self.rate = {"out": links.to_host_nbytes_per_s, "back": links.to_device_nbytes_per_s}
        chain, count = self.chain, len(self.groups)
        self.input = [chain.total(chain.crossing(i)) for i in range(count)]
        over = [n + chain.behind[count] for n in self.input]
        self.keeping = [n + chain.forward_peak(i, self.groups.saved[i]) for i, n in enumerate(over)]
        self.passing = [n + chain.forward_peak(i, frozenset()) for i, n in enumerate(over)]
        self.turning = [n + chain.backward_peak(i, table.options[i][0]) for i, n in enumerate(self.input)]
        self.back_s = [sum(chain.graph.ops[op].first.time_s for op in run) for run in self.groups.backward]
        self.placements = [self._placements(i) for i in range(count)]
        self.arrived: list[list[Labels]] = [[] for _ in range(count + 1)]
        self.arrived[0].append(np.zeros(1, FIELDS))
        self.labels: list[Labels] = []
        for i in range(count):
            labels = undominated(
                self._arrivals(i), self.budget, most, worth_s, host=self.host_budget is not None
            )
            self.labels.append(labels)
            if len(labels) and not deadline.reached():
                self._keep(i, labels)
                self._drop(i, labels)
        self.labels.append(self._join_queues(self._arrivals(count)))

    def _arrivals(self, i: int) -> Labels:
        found = np.concatenate([np.zeros(0, FIELDS), *self.arrived[i]])
        self.arrived[i].clear()
        return found

    def plans(self) -> Iterator[ChainPlan]:
        """The plans at the end, fastest by estimate first, then with the fewest bytes on the host."""
        for number in range(len(self.labels[-1])):
            runs: list[GroupRun] = [("forward", s, 0) for s in range(len(self.groups))]
            moved: set[int] = set()
            stage, chosen = len(self.groups), number
            lost_s = float(self.labels[stage][number]["lost_s"])
            while stage > 0:
                label = self.labels[stage][chosen]
                end, stage, chosen = stage, int(label["stage"]), int(label["label"])
                moved |= self.placements[stage][label["placement"]].moved
                if label["level"] == KEPT:
                    runs.append(("backward", stage, 0))
                else:
                    runs += self.table.runs(stage, end, int(label["level"]))
            yield ChainPlan(runs=tuple(runs), moved=frozenset(moved), lost_s=lost_s)

    def _placements(self, i: int) -> list[SegmentPlacement]:
        """The placements for a segment that starts at stage i; a recomputed segment holds its input alone."""
        chain = self.chain
        inputs = chain.crossing(i)
        own = self.groups.saved[i] - inputs - chain.crossing(i + 1)
        loose = sorted(filter(self._movable, own), key=lambda v: (-chain.size[v], v))
        parts = [[v] for v in loose[: PARTS - 1]] + ([loose[PARTS - 1 :]] if len(loose) >= PARTS else [])
        total = chain.total(inputs) + chain.total(own)
        found = []
        for moved_inputs in dict.fromkeys((frozenset[int](), frozenset(filter(self._movable, inputs)))):
            for number in range(len(parts) + 1):
                for chosen in combinations(parts, number):
                    sizes = tuple(chain.total(part) for part in chosen)
                    placement = SegmentPlacement(
                        moved=moved_inputs.union(*chosen),
                        kept_nbytes=total - chain.total(moved_inputs) - sum(sizes),
                        input_nbytes=chain.total(moved_inputs),
                        own_nbytes=sizes,
                    )
                    found.append(placement)
        return found

    def _names(self, i: int) -> range:
        """Names of a stage's input and of its own parts in a queue."""
        return range(i * (PARTS + 1), (i + 1) * (PARTS + 1))

    def _movable(self, value: int) -> bool:
        stored = self.chain.graph.values[value]
        return self.chain.size[value] > 0 and not stored.pinned and stored.placement is None

    def _keep(self, i: int, labels: Labels) -> None:
        """Add labels that keep stage i whole."""
        labels = labels.copy()
        self._wait(labels, "out", self.keeping[i])
        self._wait(labels, "back", self.turning[i])
        drain(labels, "back", self.back_s[i] * self.rate["back"])
        for number, placement in enumerate(self.placements[i]):
            after = labels.copy()
            own = sorted(zip(placement.own_nbytes, self._names(i)[1:], strict=False))
            if placement.input_nbytes:
                join(after, "out", placement.input_nbytes, self._names(i)[0], overtakes=True)
            drain(after, "out", self.chain.first_s[i] * self.rate["out"])
            for nbytes, name in own:
                join(after, "out", nbytes, name)
            for nbytes, name in sorted([*own, (placement.input_nbytes, self._names(i)[0])]):
                if nbytes:  # of the values that one run needs the largest comes back first
                    join(after, "back", nbytes, name)
            after["kept"] += placement.kept_nbytes
            after["level"] = KEPT
            self._arrive(i, i + 1, number, placement, after)

    def _drop(self, i: int, labels: Labels) -> None:
        """Add labels that recompute stages i to k - 1, for every k."""
        own = self.chain.total(self.groups.saved[i] - self.chain.crossing(i) - self.chain.crossing(i + 1))
        for number, placement in enumerate(self.placements[i]):
            if placement.own_nbytes:
                continue
            ahead, back_s = labels.copy(), 0.0
            for k in range(i + 1, len(self.groups) + 1):
                self._wait(ahead, "out", self.passing[k - 1])
                if k == i + 1:
                    if placement.input_nbytes:
                        join(ahead, "out", placement.input_nbytes, self._names(i)[0], overtakes=True)
                    ahead["kept"] += placement.kept_nbytes - own
                drain(ahead, "out", self.chain.first_s[k - 1] * self.rate["out"])
                back_s += self.back_s[k - 1]
                for drained in DRAINED:
                    after = ahead.copy()
                    self._recompute(i, k, labels["kept"], back_s, drained, after)
                    if placement.input_nbytes:
                        join(after, "back", placement.input_nbytes, self._names(i)[0])
                    self._arrive(i, k, number, placement, after)

    def _recompute(self, i: int, k: int, kept: Floats, back_s: float, drained: float, labels: Labels) -> None:
        """The backward of a recomputed segment, concurrent with the queue back."""
        wait = drained * labels["back_left"].sum(axis=1)
        drain(labels, "back", wait)
        headroom = self.budget - kept - self.input[i] - held(labels, "back").sum(axis=1)
        level = np.minimum(np.floor(headroom / self.table.slot_nbytes + 1e-9), self.table.slots - 1)
        labels["level"] = np.maximum(level, 0.0)
        again_s = np.where(level < 0, np.inf, self.table.cost[i, k][labels["level"]])
        labels["lost_s"] += wait / self.rate["back"] + again_s
        drain(labels, "back", (np.where(np.isfinite(again_s), again_s, 0.0) + back_s) * self.rate["back"])

    def _wait(self, labels: Labels, queue: str, nbytes: int) -> None:
        """Wait for copies of a queue until n bytes fit.

        Queue "out" is waited for before a forward that needs them, "back" after such a backward.
        """
        wait = waits(labels[f"{queue}_left"], held(labels, queue), self.budget - nbytes - labels["kept"])
        labels["lost_s"] += wait / self.rate[queue]
        drain(labels, queue, np.where(np.isfinite(wait), wait, 0.0))

    def _arrive(self, i: int, k: int, number: int, placement: SegmentPlacement, labels: Labels) -> None:
        labels["stage"], labels["label"], labels["placement"] = i, np.arange(len(labels)), number
        labels["host"] += placement.input_nbytes + sum(placement.own_nbytes)
        usable = np.isfinite(labels["lost_s"])
        if self.host_budget is not None:
            usable &= labels["host"] <= self.host_budget
        self.arrived[k].append(labels[usable])

    def _join_queues(self, labels: Labels) -> Labels:
        """Where the queues meet: values in both stay on the device, those in one delay the other queue."""
        free = self.budget - labels["kept"]
        lone = {queue: ~in_both_queues(labels, queue) for queue in ("out", "back")}
        left = {queue: labels[f"{queue}_left"] * lone[queue] for queue in lone}
        headroom_out = free - self.turning[-1] - held(labels, "back").sum(axis=1)
        headroom_back = free - self.passing[-1] - held(labels, "out").sum(axis=1)
        late = waits(left["out"], held(labels, "out") * lone["out"], headroom_out)
        early = waits(left["back"], held(labels, "back") * lone["back"], headroom_back)
        late = np.minimum(late, left["out"].sum(axis=1))
        early = np.minimum(early, left["back"].sum(axis=1))
        labels["lost_s"] += late / self.rate["out"] + early / self.rate["back"]
        return labels[np.lexsort((labels["host"], labels["lost_s"]))]
