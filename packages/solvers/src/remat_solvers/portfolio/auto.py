"""`auto`, the portfolio: several methods one after the other.

Each step runs only if the gap to the lower bound is still open: save everything; the floor, which may prove
that nothing fits; greedy eviction for a first valid schedule; the cut bound, whose cut is also a start;
solvers of other packages, if requested; a short walk, if nothing fits yet; the coarse program, round by round
while it is cheap and gains, whose solutions are also starts and often optimal; interval DP; cuts at the
boundary (`mincut`). Each start is polished. Sequence annealing follows: a short cold and a short warm walk
from the best starts, then walks from the best plan and from other fast ones by turns, until several in a row
gain nothing: the wider the gap, the more. If no start fits, the search for the smallest peak runs. If a wide
gap remains and the coarse program has found a best plan, it gets more work, and the search continues there. A
candidate counts only if the referee accepts it, and no schedule over the budget is returned.

Deterministic for a seed and an amount of work, unless the deadline cuts in: all parts count their work.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import attrs
import numpy as np

from remat_graph.errors import text_of
from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.coarse_time_bound import CoarseBound, Round
from remat_solvers.bounds.reachability import Reachability, reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.errors import SolverWarning
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk, default_moves, fewer_moves
from remat_solvers.local_search.evict import evict, keep_only
from remat_solvers.local_search.min_peak import minimize_peak
from remat_solvers.local_search.polish import polish
from remat_solvers.methods.interval_dp import plan
from remat_solvers.methods.mincut import cheapest
from remat_solvers.methods.noremat import NoRemat
from remat_solvers.parallel import LANES, in_parallel
from remat_solvers.portfolio.isolated import solve_in_subprocess
from remat_solvers.protocol import Deadline, Problem, Solution, Status, judge

Stats = dict[str, int | float | str | bool]

CUTS = 12  # prices for the cut between forward and backward
# Gaps as ratios of base time: above the first the coarse program may get a second effort.
WIDE, NARROW = 0.01, 0.003
# Work of the coarse program per op of the graph, as checks times variables of about 10 us: at first, for a
# second effort, and in all. After a round that has raised the bound by a hundredth of base time: `PER_GAIN`.
COARSE_WORK, MORE_COARSE_WORK, MOST_COARSE_WORK, PER_GAIN = 50, 125, 500, 400
LEAST_OPS = 400  # the work of smaller graphs
CHECKS, LEAST_CHECKS = 150, 8  # the most of a round, and fewer than a round needs
IDLE_ROUNDS, MOVED = 3, 1e-4  # rounds end after three that gain less than this share of base time
FIRST_MOVES, FIRST_PRICE = 40_000, 30.0  # of the walk to a first schedule: 0.4 s at 600 ops
# Walks: their moves, and (start temperature, price of memory). With the same moves in all, long walks found
# no more than short ones of mixed temperatures (three graphs at 20 %).
WALK_MOVES = 50_000
FROM_START = ((0.1, 0.3), (1.0, 3.0))
FROM_BEST = ((0.1, 0.3), (1.0, 0.02), (0.3, 0.3), (0.2, 0.02))
FROM_OTHERS = ((1.0, 3.0), (1.0, 0.3), (0.3, 3.0))
STARTS, OTHERS = 4, 4  # starts of the first walks, and the fastest plans, that differ
# Gaps, and the walks after which the search ends if none of them gained `MOVED`; more at any wider gap.
PATIENCE, MOST_PATIENCE = ((NARROW, 3), (WIDE, 6), (0.03, 12)), 20


@attrs.frozen(kw_only=True)
class Auto:
    """The portfolio.

    Attributes:
        seed: of the search's random numbers.
        moves: changes that the search may try, and as many again where a wide gap is left, fewer where it
            gains nothing; None for an amount that takes about 2 s at 600 ops.
        gap: stop when the overhead is within this ratio of base time from the lower bound; walks, which take
            the most time, stop at twice that.
        starts: valid orders to begin with, such as the plan of a smaller budget.
        proofs: whether to raise the lower bound by the coarse program, whose solutions are starts too.
        guests: names of other registered solvers whose results count too; each runs in its own process, and
            one that crashes, hangs or returns nonsense is skipped with a warning.
        guest_seconds: time limit of each guest.
    """

    name: ClassVar[str] = "auto"
    seed: int = 0
    moves: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    gap: float = attrs.field(default=0.0005, validator=attrs.validators.ge(0))
    starts: tuple[tuple[int, ...], ...] = attrs.field(default=(), converter=tuple)
    proofs: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    guests: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    guest_seconds: float = attrs.field(default=20.0, validator=attrs.validators.gt(0))

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        deadline = deadline or Deadline()
        unplanned = NoRemat().solve(problem)
        if unplanned.feasible:
            return attrs.evolve(unplanned, stats={"method": "noremat"})
        graph, budget = problem.graph, problem.budget_nbytes
        reach = reachability(graph)
        floor = budget_floor(graph, reach)
        if budget < floor.nbytes:
            stats: Stats = {"method": "floor", "floor_nbytes": floor.nbytes, "floor_op": floor.op}
            return _infeasible(problem, stats)
        return _Portfolio(self, problem, deadline, flatten(graph), floor.nbytes, reach).solve()


def _infeasible(problem: Problem, stats: Stats) -> Solution:
    """No schedule fits; `stats` names the certificate."""
    nothing = judge(problem, None, stats=stats)
    return attrs.evolve(nothing, status=Status.INFEASIBLE, lower_bound_s=float("inf"))


@attrs.frozen(kw_only=True, eq=False)
class _Walk:
    """An annealing walk to come."""

    walk: AnnealingWalk
    moves: int
    hot: float

    def run(self, deadline: Deadline) -> None:
        self.walk.anneal(self.moves, self.hot, 0.01, deadline)


class _Portfolio:
    """One solve: the best order so far and the method that found it."""

    def __init__(
        self,
        settings: Auto,
        problem: Problem,
        deadline: Deadline,
        arrays: Arrays,
        floor_nbytes: int,
        reach: Reachability,
    ) -> None:
        self.settings, self.problem, self.deadline, self.arrays = settings, problem, deadline, arrays
        self.floor_nbytes, self.reach = floor_nbytes, reach
        self.base_s = problem.graph.time_s
        self.bound_s = self.cut_s = self.base_s
        self.best: Ints | None = None
        self.best_s = float("inf")
        self.smallest_nbytes: int | None = None  # peak of any order so far
        self.method = ""
        self.plans: list[tuple[float, Ints]] = []  # the fastest that differ
        self.moves = self.rounds = self.idle_rounds = 0
        self.coarse_gained = False  # whether a round found the best plan of its time

    def solve(self) -> Solution:
        graph, budget = self.problem.graph, self.problem.budget_nbytes
        arrays, deadline = self.arrays, self.deadline
        self.report("floor")
        starts = self.caller_starts()
        starts += self.attempt("greedy", lambda: evict(arrays, budget, deadline))
        bound = CutBound(graph, self.reach)
        self.bound_s = self.cut_s = self.base_s + bound.extra_s(budget, deadline)
        self.report("bound")
        binding = bound.binding()
        if binding is not None and not self.closed():
            starts = self.attempt("cut", lambda: keep_only(arrays, budget, *binding, deadline)) + starts
        starts += self.run_guests()
        if self.best is None and starts and self.settings.moves != 0:
            self.attempt("walk", lambda: self.first(starts))  # no start: walks from others find more
        coarse = CoarseBound(bound, arrays, budget)
        if self.best is None:  # the search for the smallest peak needs its share of the time
            starts += self.refine(coarse, COARSE_WORK, deadline.share(0.5))
        if not self.closed():
            starts += self.attempt("interval_dp", lambda: plan(graph, arrays, budget, deadline))
        if not self.closed():
            starts += self.attempt("mincut", lambda: cheapest(arrays, bound, budget, CUTS, deadline)[0])
        if self.best is None and not deadline.reached():
            starts += self.attempt(
                "descend", lambda: minimize_peak(arrays, budget, self.floor_nbytes, deadline)
            )
        if self.best is None and self.bound_s == float("inf"):
            moments = ", ".join(graph.ops[i].name for i in coarse.moments)
            return _infeasible(self.problem, {"method": "coarse", "moments": moments})
        if self.best is not None:
            if not self.rounds:
                starts = self.refine_and_walk(coarse, starts)
            self.search(starts, self.settings.seed)
            # The search finds more than further rounds, unless a round has found what no walk had.
            if self.coarse_gained and not (self.closed(WIDE) or self.idle_rounds >= IDLE_ROUNDS):
                refined = self.refine(coarse, MORE_COARSE_WORK, deadline)
                self.search(refined, self.settings.seed + 1000, idle=self.patience)
        stats: Stats = {"method": self.method, "moves": self.moves, "rounds": self.rounds}
        stats["deadline"] = deadline.hit
        solution = judge(self.problem, self.best, lower_bound_s=self.bound_s, stats=stats)
        return solution if solution.feasible else attrs.evolve(solution, smallest_nbytes=self.smallest_nbytes)

    def closed(self, gap: float | None = None) -> bool:
        gap = self.settings.gap if gap is None else max(gap, self.settings.gap)
        return self.best_s - self.bound_s <= gap * self.base_s

    def caller_starts(self) -> list[Ints]:
        """The caller's starts, as far as they are valid."""
        found = []
        for start in self.settings.starts:
            order = np.array(start, np.int64)
            if evaluate(self.arrays, order).valid:
                found.append(self.add_start(order, "start"))
            else:
                self.warn("a start is not a valid order")
        if self.settings.starts:
            self.report("start")
        return found

    def attempt(self, method: str, find: Callable[[], Ints | None]) -> list[Ints]:
        """The result of one part of the portfolio; a part that fails is skipped with a warning."""
        found: list[Ints] = []
        try:
            order = find()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others still answer
            self.warn(f"{method} failed ({type(error).__name__}: {text_of(error)})")
        else:
            found = [] if order is None else [self.add_start(order, method)]
        self.report(method)
        return found

    def report(self, part: str) -> None:
        """Report that a part of the portfolio has ended."""
        self.deadline.report(part, None if self.best is None else self.best_s, self.bound_s)

    def warn(self, problem: str) -> None:
        warnings.warn(f"{problem}: the other methods continue", SolverWarning, stacklevel=3)

    def fitting(self, result: Round) -> Ints | None:
        """The sequence of a round, with more evictions if it does not fit."""
        if result.fits or result.order is None:
            return result.order
        return evict(self.arrays, self.problem.budget_nbytes, self.deadline, result.order)

    def first(self, starts: list[Ints]) -> Ints | None:
        """A short walk from the smallest peak so far to a schedule within the budget."""
        moves = fewer_moves(FIRST_MOVES, len(self.problem.graph.ops))
        if self.settings.moves is not None:
            moves = min(moves, self.settings.moves)
        order = min(starts, key=lambda start: evaluate(self.arrays, start).peak_nbytes)
        walk = AnnealingWalk(self.arrays, order, self.problem.budget_nbytes, self.settings.seed, FIRST_PRICE)
        found = walk.anneal(moves, 1.0, 0.1, self.deadline)
        self.moves += walk.tried
        return found

    def refine(self, coarse: CoarseBound, work: int, deadline: Deadline) -> list[Ints]:
        """Solve rounds of the coarse program while they finish, are cheap, and gain; return the sequences."""
        found: list[Ints] = []
        ops = max(LEAST_OPS, len(self.problem.graph.ops))
        left, most = work * ops, MOST_COARSE_WORK * ops
        while (
            self.settings.proofs
            and self.idle_rounds < IDLE_ROUNDS
            and not (coarse.finished or deadline.reached())
        ):
            variables = max(1, coarse.variables)
            checks = min(CHECKS, min(left, most) // variables)
            if checks < LEAST_CHECKS or (self.closed() and not coarse.proving):
                break
            best_s, bound_s = self.best_s, self.bound_s
            try:
                result = coarse.round(deadline, enough_s=self.best_s - self.base_s, checks=checks)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others still answer
                self.warn(f"the coarse program failed ({type(error).__name__}: {text_of(error)})")
                break
            if self.base_s + result.extra_s > self.best_s + result.slack_s:
                self.warn("the coarse program returned a bound above the time of a known schedule")
                self.bound_s = self.cut_s
                break
            self.bound_s = max(self.bound_s, self.base_s + result.extra_s)
            if result.order is not None:
                found += self.attempt("coarse", partial(self.fitting, result))
            if result.proven and self.best_s - self.bound_s <= result.slack_s:
                self.bound_s = self.best_s
            self.rounds += 1
            most -= result.checks * variables
            least_s = MOVED * self.base_s
            raised_s = min(self.bound_s, self.best_s) - bound_s
            self.coarse_gained |= self.best_s < best_s - least_s
            gained = self.best_s < best_s - least_s or raised_s > least_s
            self.idle_rounds = 0 if gained else self.idle_rounds + 1
            left = work * ops if gained else left - result.checks * variables
            left = max(left, int(PER_GAIN * ops * min(1.0, raised_s / (WIDE * self.base_s))))
            if not result.ended:
                break
        return found

    def add_start(self, order: Ints, method: str) -> Ints:
        """Polish an order that fits, and take it if it is the fastest so far."""
        result = evaluate(self.arrays, order)
        if result.valid:
            smallest = self.smallest_nbytes
            self.smallest_nbytes = min(smallest or result.peak_nbytes, result.peak_nbytes)
        if result.valid and result.peak_nbytes <= self.problem.budget_nbytes:
            order = polish(self.arrays, order, self.problem.budget_nbytes, self.deadline)
            result = evaluate(self.arrays, order)
            fits = result.valid and result.peak_nbytes <= self.problem.budget_nbytes
            if fits:
                self.note(result.time_s, order)
            if fits and result.time_s < self.best_s:
                self.best, self.best_s, self.method = order, result.time_s, method
                if self.best_s < self.bound_s - 1e-9 * self.base_s:
                    self.warn("a schedule below the coarse program's bound was found")
                    self.bound_s = self.cut_s
        return order

    def run_guests(self) -> list[Ints]:
        """Orders of the guest solvers whose schedules are valid and fit."""
        found: list[Ints] = []
        for name in self.settings.guests:
            if self.closed() or self.deadline.reached():
                break
            seconds = min(self.settings.guest_seconds, self.deadline.remaining_s)
            reply = solve_in_subprocess(
                name,
                self.problem,
                seconds,
                most_s=max(1.0, self.deadline.remaining_s),
                deadline=self.deadline,
            )
            problem = reply.problem
            if reply.order is not None:
                order = np.array(reply.order, np.int64)
                result = evaluate(self.arrays, order)
                if not result.valid:
                    problem = "returned an invalid order"
                elif result.peak_nbytes > self.problem.budget_nbytes:
                    problem = "returned a schedule above the budget"
                else:
                    found.append(self.add_start(order, name))
            if problem and not self.deadline.stopped:
                self.warn(f"solver {name!r} {problem}")
            self.report(name)
        return found

    def note(self, time_s: float, order: Ints) -> None:
        """Keep a plan if it is among the fastest; plans of the same time count as the same."""
        if all(abs(time_s - known_s) > 1e-12 * self.base_s for known_s, _ in self.plans):
            self.plans = sorted([*self.plans, (time_s, order)], key=lambda plan: plan[0])[:OTHERS]

    def search(self, starts: list[Ints], seed: int, idle: int = 0) -> None:
        """Short walks from the best starts, then from the best plan and others by turns, while they gain.

        `idle` walks have gained nothing before.
        """
        starts = self.best_of(starts)
        walks = self.walks(starts)
        done = 0
        while done < self.most_walks:
            if self.closed(2 * self.settings.gap) or self.deadline.reached():
                return
            if done >= len(FROM_START) * len(starts) and idle >= self.patience:
                return
            before_s = self.best_s
            batch = [self.walk(*next(walks), seed=seed + done + i) for i in range(LANES)]
            in_parallel([walk.run for walk in batch], self.deadline)
            self.take(batch)
            done += LANES
            idle = 0 if self.best_s < before_s - MOVED * self.base_s else idle + LANES

    def refine_and_walk(self, coarse: CoarseBound, starts: list[Ints]) -> list[Ints]:
        """Rounds of the coarse program beside the first walks; returns the starts that are left."""
        seed = self.settings.seed + 2000
        first = [(start, *pair) for start in self.best_of(starts) for pair in FROM_START]
        walks = [self.walk(*each, seed=seed + i) for i, each in enumerate(first[: self.most_walks])]

        found: list[Ints] = []

        def refine(deadline: Deadline) -> None:
            found.extend(self.refine(coarse, COARSE_WORK, deadline))

        def walk(deadline: Deadline) -> None:
            for each in walks:
                each.run(deadline)

        in_parallel([refine, walk], self.deadline)
        if not self.closed():
            self.take(walks)
        return found

    @property
    def most_walks(self) -> int:
        """Walks of a search at the most."""
        ops, most, each = len(self.arrays.backward), self.settings.moves, self.moves_of_walk
        most = default_moves(ops) if most is None else most
        return -(-most * (1 if self.closed(WIDE) else 2) // each) if each else 0

    @property
    def moves_of_walk(self) -> int:
        each = fewer_moves(WALK_MOVES, len(self.arrays.backward))
        return each if self.settings.moves is None else min(each, self.settings.moves)

    def walk(self, order: Ints, hot: float, price: float, seed: int) -> "_Walk":
        walk = AnnealingWalk(self.arrays, order, self.problem.budget_nbytes, seed, price)
        return _Walk(walk=walk, moves=self.moves_of_walk, hot=hot)

    def take(self, walks: list["_Walk"]) -> None:
        """Take what walks have found."""
        for each in walks:
            self.moves += each.walk.tried
            if each.walk.best is not None:
                self.add_start(each.walk.best, "search")
        self.report("search")

    def best_of(self, starts: list[Ints]) -> list[Ints]:
        """The fastest starts that differ, or if none fits those with the smallest peaks."""

        def rank(start: Ints) -> tuple[int, float]:
            result = evaluate(self.arrays, start)
            return max(0, result.peak_nbytes - self.problem.budget_nbytes), result.time_s

        differing = {start.tobytes(): start for start in starts}
        return sorted(differing.values(), key=rank)[:STARTS]

    @property
    def patience(self) -> int:
        """Walks without a gain after which the search ends."""
        return next((walks for gap, walks in PATIENCE if self.closed(gap)), MOST_PATIENCE)

    def walks(self, starts: list[Ints]) -> Iterator[tuple[Ints, float, float]]:
        """Where walks begin, with which temperature and price; without end."""
        for start in starts:
            for hot, price in FROM_START:
                yield start, hot, price
        for i in itertools.count():
            assert self.best is not None
            for hot, price in FROM_BEST:
                yield self.best, hot, price
            yield self.plans[i % len(self.plans)][1], *FROM_OTHERS[i % len(FROM_OTHERS)]
