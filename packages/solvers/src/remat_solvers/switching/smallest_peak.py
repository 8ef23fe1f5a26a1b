"""Search the smallest peak of a graph with switches, over decisions and sequences."""

from collections.abc import Iterable

import attrs

from remat_graph import Graph, Schedule, Specialized, specialize
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.decisions import combinations_of
from remat_solvers.evaluation.arrays import flatten
from remat_solvers.local_search.joint import DecidedOrder, JointSearch
from remat_solvers.local_search.min_peak import default_peak_moves, minimize_peak
from remat_solvers.protocol import Deadline

CANDIDATE_SHARE = 0.6  # of the time that is left, for one candidate


def smallest_peak(
    graph: Graph, floor_nbytes: int, deadline: Deadline, *, goal_nbytes: int = 0, moves: int | None = None
) -> Schedule:
    """A schedule with a small peak, of the best decision that is found; none needs less than the floor.

    The search stops at a peak of `goal_nbytes`. Until then it is the same search with any goal, so a budget
    that was once reached is reached again, unless the deadline or a smaller number of moves ends it.
    """
    goal_nbytes = max(goal_nbytes, floor_nbytes)
    tried, all_of_them = combinations_of(graph)
    search = _PeakSearch(JointSearch(graph, 0), goal_nbytes, deadline)
    candidates = [_Candidate.of(graph, tried[0])]
    candidates += (_Candidate.of(graph, on) for on in tried[1:] if not deadline.reached())
    if all_of_them:
        for one in sorted(candidates, key=lambda one: one.floor_nbytes):
            search.minimize(one)
        return search.best.schedule
    for one in candidates:
        search.minimize(one, moves=0)
    full = default_peak_moves(len(graph.ops))
    full = full if moves is None else min(moves, full)
    search.minimize(min(candidates, key=search.promise), moves=full // 2)
    search.minimize(candidates[0], moves=full // 4)  # all off
    if not search.done:
        search.joint.shrink(goal_nbytes, floor_nbytes, full // 8, deadline.share(0.5))
        search.minimize(_Candidate.of(graph, search.best.made.on), moves=full // 8)
    return search.best.schedule


@attrs.frozen(kw_only=True, eq=False)
class _Candidate:
    """A decision, and the bytes that none of its schedules goes below."""

    made: Specialized
    floor_nbytes: int

    @classmethod
    def of(cls, graph: Graph, on: Iterable[str]) -> "_Candidate":
        made = specialize(graph, on)
        return cls(made=made, floor_nbytes=budget_floor(made.graph).nbytes)


@attrs.frozen(eq=False)
class _PeakSearch:
    """A search for a peak of at most `goal_nbytes` among several decisions."""

    joint: JointSearch
    goal_nbytes: int
    deadline: Deadline

    @property
    def best(self) -> DecidedOrder:
        """The smallest peak so far."""
        best = self.joint.smallest
        assert best is not None
        return best

    @property
    def done(self) -> bool:
        return self.joint.smallest is not None and self.best.peak_nbytes <= self.goal_nbytes

    def promise(self, one: _Candidate) -> tuple[int, int]:
        """Smaller is better: its floor, then the smallest peak so far."""
        known = self.joint.found.get(one.made.on)
        return one.floor_nbytes, one.floor_nbytes if known is None else known.peak_nbytes

    def minimize(self, one: _Candidate, moves: int | None = None) -> None:
        """Search the sequences of one decision, if one may be smaller than the best."""
        known = self.joint.smallest
        if known is not None and (self.done or one.floor_nbytes >= known.peak_nbytes):
            return
        arrays, before = flatten(one.made.graph), self.joint.found.get(one.made.on)
        goal_nbytes = max(self.goal_nbytes, one.floor_nbytes)
        part = self.deadline.share(CANDIDATE_SHARE)
        start = None if before is None else before.order
        order = minimize_peak(arrays, goal_nbytes, one.floor_nbytes, part, moves=moves, start=start)
        self.joint.add(one.made, order, part)
