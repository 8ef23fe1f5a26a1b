"""Plan a graph with switches: decide them, and let a solver plan what is decided.

Up to `MOST_COMBINED` switches: all combinations are candidates (`switching.each_combination`).

More switches: cheap plans of all off, all on, one family on and one family off, and where none fits divide
and conquer; short annealing of all off, and some that flips switches while it searches sequences
(`local_search.joint`); the solver on all off, without a start unless the gap is wide, or on the best decision
if that is better by more than solves differ, and at the same time on all off, or on a whole family if the
bound of all off is no better than the best plan; and short annealing again, which flips switches of the best
plan. So a choice does not lose to none. Whole families that may be better are planned by the solver as well:
all of them on small graphs, on larger ones the two that are best after short annealing, if the best plan is
far from the bound and they are behind it by no more than the solver has gained over annealing. Where nothing
fits, the solver gets the decision that could need the least memory, then the one with the smallest peak, then
all off. A solver that takes no `starts` plans all off, all on, one family on and one family off in the order
of their bounds. The bound of the whole is that of the relaxed graph, or where the gap is wide the lowest of
the bounds of several parts of the decisions; rounds of the coarse program raise it while the solver plans.

Deterministic for a solver that is, unless the deadline cuts in.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import isfinite
from typing import Any

import attrs

from remat_graph import Schedule
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.decisions import (
    MOST_COMBINED,
    NEAR,
    DecidedBound,
    combinations_of,
    time_bound_s,
)
from remat_solvers.errors import warn_of
from remat_solvers.local_search.anneal import default_moves, fewer_moves
from remat_solvers.local_search.joint import DecidedOrder, JointSearch, Walk
from remat_solvers.protocol import Deadline, Problem, Solution, Solver, Status, judge_schedule
from remat_solvers.running.parallel import LANES, batches, in_parallel
from remat_solvers.switching.each_combination import report_part, solve_each
from remat_solvers.switching.smallest_peak import smallest_peak

# Of the time left, in this order: for all candidates, for flips, for the best decision.
QUICK_SHARE, FLIP_SHARE, SOLVER_SHARE = 0.2, 0.35, 0.85
BOUNDS_SHARE = 0.3  # for the bounds of parts of the decisions, and for rounds of the coarse program
PEAK_SHARE = 0.8  # for a first plan that fits, if no candidate does
OFF_SHARE = 0.4  # of the time for flips, for all off alone, which gets three fifths of their moves
JOINT_MOVES, MOST_JOINT_MOVES = 0.02, 0.4  # flips as a share of a solve: for each switch, and in all
LEAST_MOVES = 30_000
CLOSED = 0.1  # of the gap: what a pair of walks must gain
# Start temperatures and prices of an annealing.
WALKS = ((1.0, 3.0), (0.1, 0.3))
# All off is planned alone unless another decision saves more than this ratio of base time: two searches of
# one graph ended up to a hundredth apart (small transformers at 40 %).
WORTH = 0.01
STARTS = 5  # whole families from which annealing starts
SMALL_OPS = 60  # of graphs on which the solver plans each whole family, in a fraction of a second each
ROUNDS_OPS = 60  # of graphs whose rounds of the coarse program take a hundredth of a second
MEDIUM_OPS = 200  # of graphs that are solved in a second or two
FAR, TIGHT = 0.01, 0.1  # ratios of base time, between plan and bound
MOST_FAMILIES = 2  # that the solver plans on larger graphs
REACH = 1e-3  # a ratio of base time: how much further than the solver's gain it may be behind
FAMILY_MOVES = 30_000  # of each annealing that chooses them, by start temperature and price
FAMILY_ANNEALING = ((0.1, 0.3), (1.0, 3.0))
GAP = 0.0005  # stop when the time is within this ratio of base time from the lower bound, as `auto` does


def solve_switches(
    solver: Solver, problem: Problem, deadline: Deadline | None = None, *, start: Schedule | None = None
) -> Solution:
    """Solve a problem whose graph may have switches; without any, this is `solver.solve`.

    Args:
        solver: plans graphs without switches.
        problem: graph and budget.
        deadline: limit by the clock.
        start: a schedule of the graph to begin with, for a graph with many switches.
    """
    graph = problem.graph
    if not graph.switches or getattr(solver, "plans_switches", False):
        return solver.solve(problem, deadline)
    deadline = deadline or Deadline()
    if len(graph.switches) > MOST_COMBINED and _takes_starts(solver):
        return _Decisions(solver, problem, deadline).solve(start)
    return solve_each(solver, problem, deadline)


def _takes_starts(solver: Solver) -> bool:
    return attrs.has(type(solver)) and hasattr(solver, "starts")


class _Decisions:
    """One solve of a graph with many switches."""

    def __init__(self, solver: Any, problem: Problem, deadline: Deadline) -> None:
        self.solver, self.problem, self.deadline = solver, problem, deadline
        self.graph, self.budget_nbytes = problem.graph, problem.budget_nbytes
        self.bound = DecidedBound(self.graph, self.budget_nbytes, deadline)
        self.lower_s = self.bound.lower_s
        self.search = JointSearch(self.graph, self.budget_nbytes, getattr(solver, "seed", 0))
        moves = getattr(solver, "moves", None)
        self.moves = default_moves(len(self.graph.ops)) if moves is None else moves
        self.divided = False
        self.bounds: dict[frozenset[str], float] = {}
        self.planned: set[frozenset[str]] = set()  # decisions that the solver has had without a start
        self.solver_gain_s = float("inf")  # of its first plan over the annealed one

    def solve(self, start: Schedule | None) -> Solution:
        graph, budget, deadline = self.graph, self.budget_nbytes, self.deadline
        if self.lower_s == float("inf"):
            nothing = judge_schedule(self.problem, None)
            return attrs.evolve(nothing, status=Status.INFEASIBLE, lower_bound_s=self.lower_s)
        self.report("bound")
        self.candidates(start)
        if not (self.search.fitting or deadline.reached()):
            smallest = self.search.smallest
            likely = [one for one in self.search.found.values() if one is smallest or not one.made.on]
            self.search.divide(*likely, deadline=deadline.share(QUICK_SHARE))
            self.report("divide and conquer")
        if not (self.search.fitting or deadline.reached()):
            part = deadline.share(PEAK_SHARE)
            found = smallest_peak(
                graph,
                self.bound.floor_nbytes,
                part,
                goal_nbytes=budget,
                moves=getattr(self.solver, "moves", None),
            )
            self.search.take(found, part)
            self.report("smallest peak")
        share = min(MOST_JOINT_MOVES, JOINT_MOVES * len(graph.switches))
        moves = max(LEAST_MOVES, round(self.moves * share)) if self.moves else 0
        part = deadline.share(FLIP_SHARE)
        self.anneal_off(part.share(OFF_SHARE), moves // 5)
        self.anneal(part, self.search.fitting[:STARTS], moves)
        if self.closed() or deadline.reached():
            return self.best({"method": "switches"})
        self.divide()
        if self.closed():
            return self.best({"method": "switches"})
        annealed_s = self.best_s
        for ones in self.chosen():
            solution = self.decided(*ones, afresh=[one for one in ones[1:] if one.made.on], bounding=True)
            if self.search.fitting or deadline.reached():
                break
        self.solver_gain_s = annealed_s - self.best_s if isfinite(annealed_s) else float("inf")
        self.divide()
        if len(graph.ops) <= SMALL_OPS:
            self.solve_families()
        else:
            self.anneal_families(self.families_worth(solution))
        if not self.closed(NEAR):
            self.anneal(deadline, [], moves)
        peaks = [] if solution.smallest_nbytes is None else [solution.smallest_nbytes]
        return self.best(solution.stats, *peaks)

    def divide(self) -> None:
        """Once there is a plan, if it is far from the bound: bound parts of the decisions one by one."""
        if self.divided or not self.search.fitting or self.closed(WORTH):
            return
        self.divided = True
        self.bound.branch(self.best_s - NEAR * self.graph.time_s, self.deadline.share(BOUNDS_SHARE))
        self.lower_s = self.bound.lower_s
        self.report("bound")

    def families_worth(self, solution: Solution) -> int:
        """How many whole families the solver should plan after `solution`, its plan of one decision."""
        if not self.search.fitting or self.closed(NEAR):
            return 0
        # Where that plan is as good as proven, solves are quick, and only another decision is better.
        proven = solution.time_s is not None and (
            solution.time_s - solution.lower_bound_s <= GAP * self.graph.time_s
        )
        return MOST_FAMILIES if proven or len(self.graph.ops) <= MEDIUM_OPS or not self.closed(FAR) else 0

    def chosen(self) -> list[list[DecidedOrder]]:
        """The decisions that the solver plans side by side, until one fits.

        All off is among them unless its bound is no better than the best plan; then a whole family may be.
        """
        all_off = self.search.found[frozenset()]
        if not self.search.fitting:
            lowest = min(self.search.found.values(), key=lambda one: budget_floor(one.made.graph).nbytes)
            ones = (lowest, self.search.smallest or lowest, all_off)
            return [[one] for one in {one.made.on: one for one in ones}.values()]
        best, off = self.search.fitting[0], self.off
        if off is not None and off.time_s - best.time_s <= WORTH * self.graph.time_s:
            return [[all_off]]
        others = [all_off] if self.open(all_off) else self.open_families()
        return [[best, *itertools.islice((one for one in others if one is not best), 1)]]

    @property
    def off(self) -> DecidedOrder | None:
        """The plan of all off so far, if it fits."""
        found = self.search.found.get(frozenset())
        return None if found is None or found.peak_nbytes > self.budget_nbytes else found

    def candidates(self, start: Schedule | None) -> None:
        """Cheap plans of whole families; all off is always among them."""
        part = self.deadline.share(QUICK_SHARE)
        for pair in batches(combinations_of(self.graph)[0]):
            if self.search.found and part.reached():
                break
            self.search.quick(*pair, deadline=part)
        if start is not None:
            self.search.take(start, part)
        self.report("candidates")

    def closed(self, gap: float = GAP) -> bool:
        return self.best_s - self.lower_s <= gap * self.graph.time_s

    @property
    def best_s(self) -> float:
        """Time of the best plan so far; infinite if there is none."""
        return self.search.fitting[0].time_s if self.search.fitting else float("inf")

    def report(self, part: str) -> None:
        """Report that a part of the search has ended."""
        self.deadline.report(part, self.best_s if self.search.fitting else None, self.lower_s)

    def anneal(self, deadline: Deadline, starts: Iterable[DecidedOrder], moves: int) -> None:
        """Anneal from each start, then the best, until a pair of walks gains nothing; flips switches too."""
        plans: list[tuple[DecidedOrder | None, float, float]] = [(start, *WALKS[0]) for start in starts]
        plans += [(None, *pair) for pair in WALKS] if self.search.fitting else []
        each = moves // max(1, len(plans))
        plans += [(None, *WALKS[0])] * (-len(plans) % LANES)  # by a thread that would wait
        for pair in batches(plans):
            if self.closed() or deadline.reached():
                break
            before_s = self.best_s
            walks = [
                Walk(start=start or self.search.fitting[0], moves=each, hot=hot, price=price)
                for start, hot, price in pair
            ]
            self.search.anneal(walks, deadline)
            if before_s - self.best_s < max(GAP * self.graph.time_s, CLOSED * (before_s - self.lower_s)):
                break
        self.report("switches")

    def anneal_off(self, deadline: Deadline, moves: int) -> None:
        """Short annealing of all off, if it fits; flips nothing."""
        for pair in batches(WALKS):
            if self.off is None or self.closed() or deadline.reached():
                return
            walks = [Walk(start=self.off, moves=moves, hot=hot, price=price) for hot, price in pair]
            self.search.anneal_sequences(walks, deadline)

    def solve_families(self) -> None:
        """The solver's plans of the whole families that may still be better."""
        for one in self.open_families():
            if self.closed():
                return
            self.decided(one, afresh=[one])

    def anneal_families(self, most: int) -> None:
        """Anneal every whole family that may still be better; the solver plans the `most` best."""
        moves = fewer_moves(FAMILY_MOVES, len(self.graph.ops)) if self.moves else 0
        tried = [one.made.on for one in self.open_families()] if most and moves else []
        for batch in batches((*kind, on) for kind in FAMILY_ANNEALING for on in tried):
            if self.closed() or self.deadline.reached():
                return
            walks = [
                Walk(start=self.search.found[on], moves=moves, hot=hot, price=price)
                for hot, price, on in batch
            ]
            self.search.anneal_sequences(walks, self.deadline)
        if tried:
            self.report("families")
        best = sorted((self.search.found[on] for on in tried), key=self.search.rank)[:most]
        best = [one for one in best if self.within_reach(one)]
        for pair in batches(best):
            if self.closed() or self.deadline.reached():
                return
            self.decided(*pair, afresh=pair)

    def within_reach(self, one: DecidedOrder) -> bool:
        """Whether an annealed plan is behind the best by no more than the solver gained over annealing."""
        if one.peak_nbytes > self.budget_nbytes:
            return not isfinite(self.solver_gain_s)
        return one.time_s - self.best_s <= self.solver_gain_s + REACH * self.graph.time_s

    def open_families(self) -> Iterator[DecidedOrder]:
        """Whole families that the solver has not planned and whose bound is below the best; best first."""
        whole = [self.search.found.get(on) for on in combinations_of(self.graph)[0]]
        for one in sorted(filter(None, whole), key=self.search.rank):
            if self.deadline.reached():
                return
            if self.open(one):
                yield one

    def open(self, one: DecidedOrder) -> bool:
        """Whether the solver has not planned a decision whose bound is below the best plan."""
        return one.made.on not in self.planned and self.bound_s(one) < self.best_s

    def bound_s(self, one: DecidedOrder) -> float:
        """The bound of a decision, computed once."""
        if one.made.on not in self.bounds:
            bound_s = time_bound_s(one.made.graph, self.budget_nbytes, self.deadline)
            self.bounds[one.made.on] = bound_s
        return self.bounds[one.made.on]

    def decided(
        self, *ones: DecidedOrder, afresh: Collection[DecidedOrder] = (), bounding: bool = False
    ) -> Solution:
        """The solver's plans of decisions, side by side, which are kept; returns that of the first.

        Those of `afresh` do not begin with what was found so far. If `bounding`, rounds of the coarse program
        raise the bound of the whole meanwhile.
        """
        tasks: list[Callable[[Deadline], Solution | None]] = [
            partial(self.solve_decided, one, one in afresh) for one in ones
        ]
        if bounding and self.search.fitting and not self.closed(NEAR):
            tasks.append(self.refine)
        results = in_parallel(tasks, self.deadline)
        self.lower_s = self.bound.lower_s  # not before, since the other thread reads it
        solutions = [each for each in results if each is not None]
        for one, solution in zip(ones, solutions, strict=True):
            if solution.schedule is not None:
                self.search.take(one.made.restore(solution.schedule), self.deadline)
        return solutions[0]

    def refine(self, deadline: Deadline) -> None:
        """Raise the bound of the whole by rounds of the coarse program, if they do not fail."""
        try:
            self.bound.refine(self.best_s, deadline.share(BOUNDS_SHARE))
        except Exception as error:  # noqa: BLE001 - whatever it is, the plans still count
            warn_of("the coarse program", error)

    def solve_decided(self, one: DecidedOrder, afresh: bool, deadline: Deadline) -> Solution:
        """The solver's plan of one decision."""
        part = deadline.share(SOLVER_SHARE)
        part.on_progress = partial(report_part, deadline, self.best_s, self.lower_s, self.lower_s)
        # All off starts from nothing, as a graph without switches does; but where the gap is wide a search
        # from nothing ends above a plan that fits already.
        known = not self.closed(TIGHT) and one.peak_nbytes <= self.budget_nbytes
        starts = (tuple(one.order.tolist()),) if not afresh and (one.made.on or known) else ()
        if not one.made.on or not starts:
            self.planned.add(one.made.on)
        # The bound of one decision bounds nothing else, so work that only raises it is lost, unless that is
        # quick: its plans may still gain.
        changed: dict[str, object] = {"starts": starts, "bound_gains": len(self.graph.ops) <= ROUNDS_OPS}
        if afresh:
            changed["rival_s"] = self.best_s
            if len(self.graph.ops) > SMALL_OPS:
                changed["proofs"] = False
        fields = attrs.fields_dict(type(self.solver))
        chosen = attrs.evolve(self.solver, **{name: changed[name] for name in changed if name in fields})
        solution: Solution = chosen.solve(attrs.evolve(self.problem, graph=one.made.graph), part)
        return solution

    def best(self, stats: Mapping[str, Any], *peaks_nbytes: int) -> Solution:
        """The best schedule found, judged by the referee; if none fits, with the smallest peak."""
        if self.search.fitting:  # whatever it came from, no switch is on that saves nothing
            self.search.flip_greedily(self.search.fitting[0], self.deadline)
        smallest, fitting = self.search.smallest, self.search.fitting
        judged = judge_schedule(self.problem, fitting[0].schedule if fitting else None)
        stats = {**stats, "decisions": len(self.search.found)}
        if not judged.feasible:
            peaks = [*peaks_nbytes, *([smallest.peak_nbytes] if smallest else [])]
            least_s = max(self.lower_s, judged.lower_bound_s)
            return attrs.evolve(judged, lower_bound_s=least_s, smallest_nbytes=min(peaks), stats=stats)
        assert judged.time_s is not None
        lower_s = min(self.lower_s, judged.time_s)
        proven = judged.time_s <= lower_s * (1 + 1e-12)
        return attrs.evolve(
            judged,
            status=Status.OPTIMAL if proven else Status.FEASIBLE,
            lower_bound_s=lower_s,
            stats={**stats, "switched": ", ".join(sorted(fitting[0].made.on))},
        )
