"""The heuristics of Chen et al.: keep what crosses a few cuts, recompute each segment before its backward.

Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost", in the variants that
Checkmate (Jain et al. 2020) compares: cuts at articulation points only (AP), where one value crosses, or
anywhere in the linear order.

* `checkpoint_ap`: cut at every articulation point.
* `chen_sqrt`, `chen_sqrt_linear`: a cut after every sqrt(n)-th of n places, as Checkmate does it.
* `chen_greedy`, `chen_greedy_linear`: a segment ends at the first cut at which it holds more than b bytes
  (algorithm 3 of the paper), for several b; the fastest plan that fits is taken.

The paper treats chains; here the values that cross a cut are a set, skips included, so the methods are valid
for any graph. One extra forward at most; O(n) a plan. Only the greedy variants adapt their plans to the
budget.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import attrs
import numpy as np

from remat_graph import Graph
from remat_graph.partition import articulation_places, cut, forward_ops
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.linear_order import without_useless
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge

SIZES = 40  # values of b that the greedy variants try


class _Chen(Rematerializer):
    """The part that the variants share: from cuts to a solution.

    Attributes:
        anywhere: whether cuts may be at any place of the linear order, not only at articulation points.
    """

    anywhere: ClassVar[bool] = False

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """The fastest of the method's plans that fits."""
        graph, arrays = problem.graph, flatten(problem.graph)
        best: tuple[float, list[int], int] | None = None
        tried: set[tuple[int, ...]] = set()
        for cuts in self.choices(graph):
            if tried and deadline.reached():
                break
            if tuple(cuts) in tried:
                continue
            tried.add(tuple(cuts))
            order = segmented(graph, cuts)
            result = evaluate(arrays, order)
            if result.valid and result.peak_nbytes <= problem.budget_nbytes:
                found = (result.time_s, order, len(cuts))
                best = min(best or found, found)
        if best is None:
            return judge(problem, None)
        return judge(problem, best[1], stats={"segments": best[2] + 1})

    def places(self, graph: Graph) -> list[int]:
        """The places where a cut may be."""
        return list(range(1, len(forward_ops(graph)))) if self.anywhere else articulation_places(graph)

    @abstractmethod
    def choices(self, graph: Graph) -> Iterator[Sequence[int]]:
        """Sets of cuts to try."""


def segmented(graph: Graph, cuts: Sequence[int]) -> list[int]:
    """Recompute each segment of the forward before its backward, except the last one and the kept values."""
    groups = cut(graph, cuts)
    kept = frozenset[int]().union(*groups.crossing)
    order = [op for run in groups.forward for op in run]
    for s in range(len(groups) - 1, -1, -1):
        if s < len(groups) - 1:  # the last segment is still live when the backward begins
            order += [op for op in groups.repeats[s] if not kept.issuperset(graph.ops[op].first.outputs)]
        order += groups.backward[s]
    return without_useless(graph, order)


def _filled(graph: Graph, places: Sequence[int], limit: float) -> list[int]:
    """Algorithm 3: cut at the first place at which the segment holds more than `limit` bytes."""
    made = [sum(map(graph.allocated_nbytes, graph.ops[op].first.outputs)) for op in forward_ops(graph)]
    cuts: list[int] = []
    held = 0
    for before, place in pairwise([0, *places]):
        held += sum(made[before:place])
        if held > limit:
            cuts.append(place)
            held = 0
    return cuts


@attrs.frozen(kw_only=True)
class CheckpointAP(_Chen):
    """Keep what crosses every articulation point."""

    name: ClassVar[str] = "checkpoint_ap"

    def choices(self, graph: Graph) -> Iterator[Sequence[int]]:
        """All articulation points."""
        yield articulation_places(graph)


@attrs.frozen(kw_only=True)
class ChenSqrt(_Chen):
    """Every sqrt(n)-th articulation point.

    Attributes:
        every: number of places from cut to cut; None for the square root of their number.
    """

    name: ClassVar[str] = "chen_sqrt"
    every: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def choices(self, graph: Graph) -> Iterator[Sequence[int]]:
        """One set of evenly spaced cuts."""
        places = self.places(graph)
        every = self.every or math.isqrt(len(places)) or 1
        yield places[every - 1 :: every]


@attrs.frozen(kw_only=True)
class ChenSqrtLinear(ChenSqrt):
    """Every sqrt(n)-th place of all."""

    name: ClassVar[str] = "chen_sqrt_linear"
    anywhere: ClassVar[bool] = True


@attrs.frozen(kw_only=True)
class ChenGreedy(_Chen):
    """Segments of about b bytes between articulation points, for several b."""

    name: ClassVar[str] = "chen_greedy"

    def choices(self, graph: Graph) -> Iterator[Sequence[int]]:
        """One set of cuts for each b."""
        places = self.places(graph)
        total = sum(
            graph.allocated_nbytes(v) for op in forward_ops(graph) for v in graph.ops[op].first.outputs
        )
        for limit in np.geomspace(max(1.0, total / 1000), max(2.0, total), SIZES):
            yield _filled(graph, places, float(limit))


@attrs.frozen(kw_only=True)
class ChenGreedyLinear(ChenGreedy):
    """Segments of about b bytes, cut anywhere, for several b."""

    name: ClassVar[str] = "chen_greedy_linear"
    anywhere: ClassVar[bool] = True
