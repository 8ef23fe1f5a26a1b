"""`auto`, the portfolio: several methods one after the other.

Each step runs only if the gap to the lower bound is still open: save everything; the floor, which may prove
that nothing fits; greedy eviction for a first valid schedule; the cut bound, whose cut is also a start;
solvers of other packages, if requested; side by side cuts at the boundary (`mincut`), interval DP if no start
is near the bound, and if nothing fits yet divide and conquer (`halve`) and a short walk. Each start is
polished. If no start fits, the search for the smallest peak runs. Then walks from the starts
(`portfolio.walks`), and unless that is near the bound the coarse program, round by round while it is cheap
and gains, whose solutions are also starts and often optimal; in parallel a few walks from the best plan, and
then more while they gain. Where nothing fits, the coarse program comes earlier, since it may find the first
schedule. A candidate counts only if the referee accepts it, and no schedule over the budget is returned.

Deterministic for a seed and an amount of work, unless the deadline cuts in: all parts count their work.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.coarse_time_bound import CoarseBound, Round
from remat_solvers.bounds.reachability import Reachability, reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.errors import warn, warn_of
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk, fewer_moves
from remat_solvers.local_search.evict import evict, keep_only
from remat_solvers.local_search.halve import halve
from remat_solvers.local_search.min_peak import minimize_peak
from remat_solvers.methods.interval_dp import plan
from remat_solvers.methods.mincut import cheapest
from remat_solvers.methods.noremat import NoRemat
from remat_solvers.portfolio.incumbent import Incumbent
from remat_solvers.portfolio.isolated import solve_in_subprocess
from remat_solvers.portfolio.walks import FAR, MOVED, WIDE, Walks
from remat_solvers.protocol import Deadline, Problem, Solution, Status, judge
from remat_solvers.running.parallel import LANES, in_parallel

Stats = dict[str, int | float | str | bool]

CUTS = 12  # prices for the cut between forward and backward
# Work of the coarse program per op of the graph, as checks times variables of 10 to 25 us: at first, and in
# all. After a round that has raised the bound by a hundredth of base time: `PER_GAIN`.
COARSE_WORK, MOST_COARSE_WORK, PER_GAIN = 50, 500, 200
LEAST_OPS = 400  # the work of smaller graphs
CHECKS, LEAST_CHECKS = 150, 8  # the most of a round, and fewer than a round needs
NEAR_GAPS = 4  # no rounds where the plan is within as many times the wanted gap
IDLE_ROUNDS = 2  # rounds end after as many that gain less than `MOVED`; see `most_idle_rounds`
WALKS_BESIDE = 4  # in one thread, while another solves rounds; the next ones run in both
FIRST_MOVES, FIRST_PRICE = 40_000, 30.0  # of the walk to a first schedule: 0.4 s at 600 ops


@attrs.frozen(kw_only=True)
class Auto:
    """The portfolio.

    Attributes:
        seed: of the search's random numbers.
        moves: changes that the search may try, and as many again where a wide gap is left, fewer where it
            gains nothing; None for an amount that takes about 3 s at 600 ops.
        gap: stop when the overhead is within this ratio of base time from the lower bound; walks, which take
            the most time, stop at twice that.
        starts: valid orders to begin with, such as the plan of a smaller budget.
        proofs: whether to raise the lower bound by the coarse program, whose solutions are starts too.
        bound_gains: whether a round that raises only the bound gains; else only one that finds a plan does.
        rival_s: seconds of a plan that is known already; a search for plans that stays slower ends soon.
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
    bound_gains: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    rival_s: float = attrs.field(default=float("inf"), validator=attrs.validators.gt(0))
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


class _Portfolio:
    """One solve."""

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
        base_s = problem.graph.time_s
        self.known = Incumbent(
            arrays=arrays,
            budget_nbytes=problem.budget_nbytes,
            base_s=base_s,
            gap=settings.gap,
            cut_s=base_s,
            bound_s=base_s,
        )
        self.moves = self.rounds = self.idle_rounds = 0

    def solve(self) -> Solution:
        graph, budget = self.problem.graph, self.problem.budget_nbytes
        arrays, deadline, known = self.arrays, self.deadline, self.known
        self.report("floor")
        starts = self.caller_starts()
        starts += self.attempt(greedy=lambda within: evict(arrays, budget, within)).values()
        bound = CutBound(graph, self.reach)
        known.bound_s = known.cut_s = known.base_s + bound.extra_s(budget, deadline)
        self.report("bound")
        binding = bound.binding()
        if binding is not None and not known.closed():
            cut = self.attempt(cut=lambda within: keep_only(arrays, budget, *binding, within))
            starts = [*cut.values(), *starts]
        starts += self.run_guests()
        if not known.closed():
            starts += self.other_starts(bound, list(starts))
        coarse = CoarseBound(bound, arrays, budget)
        refined = known.best is None  # rounds are the next hope, with a part of the time
        if refined:
            starts += self.refine(coarse, deadline.share(0.5))
        if known.best is None and not deadline.reached():
            starts += self.attempt(
                minimize_peak=lambda within: minimize_peak(arrays, budget, self.floor_nbytes, within)
            ).values()
        if known.best is None and known.bound_s == float("inf"):
            moments = ", ".join(graph.ops[i].name for i, _ in coarse.moments)
            return _infeasible(self.problem, {"method": "coarse", "moments": moments})
        if known.best is not None:
            self.search(starts, None if refined or not self.settings.proofs else coarse)
        stats: Stats = {"method": known.method, "moves": self.moves, "rounds": self.rounds}
        stats["deadline"] = deadline.hit
        solution = judge(self.problem, known.best, lower_bound_s=known.bound_s, stats=stats)
        return (
            solution if solution.feasible else attrs.evolve(solution, smallest_nbytes=known.smallest_nbytes)
        )

    def other_starts(self, bound: CutBound, starts: list[Ints]) -> list[Ints]:
        """Starts that take longer; if none fits so far, a short walk too, from which no other walk begins."""
        graph, arrays, budget = self.problem.graph, self.arrays, self.problem.budget_nbytes
        parts: dict[str, Callable[[Deadline], Ints | None]] = {
            "mincut": lambda within: cheapest(arrays, bound, budget, CUTS, within)[0],
        }
        if not self.known.closed(WIDE):
            parts["interval_dp"] = lambda within: plan(graph, arrays, budget, within)
        if self.known.best is None:
            parts["halve"] = partial(halve, arrays, budget)
        if self.known.best is None and starts and self.settings.moves != 0:
            parts["walk"] = partial(self.first, starts)
        found = self.attempt(**parts)
        return [order for method, order in found.items() if method != "walk"]

    def search(self, starts: list[Ints], coarse: CoarseBound | None) -> None:
        """Walk from the starts, then from the best plan; if it is not near the bound, solve `coarse` too."""
        walks = self.walks(self.known, self.settings.seed, lanes=LANES)
        walks.begin(starts, self.deadline)
        if coarse is None or self.known.closed(NEAR_GAPS * self.known.gap):
            walks.go_on(self.deadline)
        else:
            self.walk_and_refine(walks, coarse)
        self.moves += walks.tried

    def walk_and_refine(self, walks: Walks, coarse: CoarseBound) -> None:
        """Walk from the best plan, and in parallel solve rounds of `coarse`, whose plans are more starts."""
        known = self.known
        alone = self.walks(known.copy(), walks.seed, lanes=1)
        alone.done, alone.tried = walks.done, walks.tried
        found: list[Ints] = []

        def refine(deadline: Deadline) -> None:
            found.extend(self.refine(coarse, deadline))
            alone.needless = known.closed()

        tasks: list[Callable[[Deadline], None]] = [refine, partial(alone.go_on, most=WALKS_BESIDE)]
        in_parallel(tasks, self.deadline)
        if known.closed():  # and what the walks did depends on when the rounds ended
            return
        walks.seed, walks.done, walks.tried = alone.seed, alone.done, alone.tried
        walks.idle, walks.turn = alone.idle, alone.turn
        ahead = known.best_s < alone.incumbent.best_s
        known.take(alone.incumbent)
        if ahead or not known.closed(FAR):
            walks.begin(found, self.deadline)
            walks.idle = 0
        walks.go_on(self.deadline)

    def walks(self, known: Incumbent, seed: int, *, lanes: int) -> Walks:
        settings = self.settings
        return Walks(
            incumbent=known,
            seed=seed,
            moves=settings.moves,
            rival_s=settings.rival_s,
            lanes=lanes,
        )

    def caller_starts(self) -> list[Ints]:
        """The caller's starts, as far as they are valid."""
        found = []
        for start in self.settings.starts:
            order = np.array(start, np.int64)
            if evaluate(self.arrays, order).valid:
                found.append(self.add_start(order, "start"))
            else:
                warn("a start is not a valid order")
        if self.settings.starts:
            self.report("start")
        return found

    def attempt(self, **parts: Callable[[Deadline], Ints | None]) -> dict[str, Ints]:
        """The results of parts of the portfolio, side by side; one that fails is skipped with a warning."""

        def find(part: Callable[[Deadline], Ints | None], within: Deadline) -> Ints | Exception | None:
            try:
                order = part(within)
                return None if order is None else self.known.polished(order, within)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others still answer
                return error

        tasks: list[Callable[[Deadline], Ints | Exception | None]] = [
            partial(find, part) for part in parts.values()
        ]
        results = in_parallel(tasks, self.deadline)
        found: dict[str, Ints] = {}
        for method, result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                warn_of(method, result)
            elif result is not None:
                self.known.add(result, method)
                found[method] = result
            self.report(method)
        return found

    def report(self, part: str) -> None:
        """Report that a part of the portfolio has ended."""
        self.deadline.report(part, None if self.known.best is None else self.known.best_s, self.known.bound_s)

    def fitting(self, result: Round, deadline: Deadline) -> Ints | None:
        """The sequence of a round, with more evictions if it does not fit."""
        if result.fits or result.order is None:
            return result.order
        return evict(self.arrays, self.problem.budget_nbytes, deadline, result.order)

    def first(self, starts: list[Ints], deadline: Deadline) -> Ints | None:
        """A short walk from the smallest peak so far to a schedule within the budget."""
        moves = fewer_moves(FIRST_MOVES, len(self.problem.graph.ops))
        if self.settings.moves is not None:
            moves = min(moves, self.settings.moves)
        order = min(starts, key=lambda start: evaluate(self.arrays, start).peak_nbytes)
        walk = AnnealingWalk(self.arrays, order, self.problem.budget_nbytes, self.settings.seed, FIRST_PRICE)
        found = walk.anneal(moves, 1.0, 0.1, deadline)
        self.moves += walk.tried
        return found

    def refine(self, coarse: CoarseBound, deadline: Deadline) -> list[Ints]:
        """Solve rounds of the coarse program while they finish, are cheap, and gain; return the sequences."""
        found: list[Ints] = []
        known = self.known
        ops = max(LEAST_OPS, len(self.problem.graph.ops))
        left, most = COARSE_WORK * ops, MOST_COARSE_WORK * ops
        while (
            self.settings.proofs
            and self.idle_rounds < self.most_idle_rounds
            and not (coarse.finished or deadline.reached())
        ):
            variables = max(1, coarse.variables)
            checks = min(CHECKS, min(left, most) // variables)
            if checks < LEAST_CHECKS or (known.closed() and not coarse.proving):
                break
            best_s, bound_s = known.best_s, known.bound_s
            try:
                result = coarse.round(deadline, enough_s=known.best_s - known.base_s, checks=checks)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others still answer
                warn_of("the coarse program", error)
                break
            if known.base_s + result.extra_s > known.best_s + result.slack_s:
                warn("the coarse program returned a bound above the time of a known schedule")
                known.bound_s = known.cut_s
                break
            known.bound_s = max(known.bound_s, known.base_s + result.extra_s)
            if result.order is not None:
                found += self.attempt(coarse=partial(self.fitting, result)).values()
            if result.proven and known.best_s - known.bound_s <= result.slack_s:
                known.bound_s = known.best_s
                self.report("coarse")
            self.rounds += 1
            most -= result.checks * variables
            least_s = MOVED * known.base_s
            raised_s = min(known.bound_s, known.best_s) - bound_s
            raised_s = raised_s if self.settings.bound_gains else 0.0
            gained = known.best_s < best_s - least_s or raised_s > least_s
            self.idle_rounds = 0 if gained else self.idle_rounds + 1
            left = COARSE_WORK * ops if gained else left - result.checks * variables
            left = max(left, int(PER_GAIN * ops * min(1.0, raised_s / (WIDE * known.base_s))))
            if not result.ended:
                break
        return found

    @property
    def most_idle_rounds(self) -> int:
        """Rounds without a gain after which they end: one where bounds are no gain and a plan is near."""
        return IDLE_ROUNDS if self.settings.bound_gains or not self.known.closed(FAR) else 1

    def add_start(self, order: Ints, method: str) -> Ints:
        order = self.known.polished(order, self.deadline)
        self.known.add(order, method)
        return order

    def run_guests(self) -> list[Ints]:
        """Orders of the guest solvers whose schedules are valid and fit."""
        found: list[Ints] = []
        for name in self.settings.guests:
            if self.known.closed() or self.deadline.reached():
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
                warn(f"solver {name!r} {problem}")
            self.report(name)
        return found
