"""Recompute and move: who is at home on the host, in which order to compute, and when to copy.

A plan has three choices. Where parameters, gradients and optimizer states are at home: on the device, on the
host, or split, the states passing through the device (`homes`, a linear program). In which order to compute,
with which repeats (`ladder`). And which activations go to the host and back instead of being made again:
`transfers.place` moves what an order does not have the room to keep. Each combination is timed by the referee
over several steps after each other (`attempt`), and the fastest that keeps both budgets is taken.

The search: everything at home on the device, if that fits; what the program says, its budgets lowered by
what the referee finds above them until it fits; then a little more and a little less on the host, each with
the order that the program would take; from the best on, orders in either direction while that is faster.
Where attempts are cheap, up to three parameters at a time then change their homes while that is better,
orders all over the range are tried, and of the best ones single repeats and single moves are left out.
What is not moved is worth a little: homes on the host must bring `WORTH` of the step against none at all.
Some 15 attempts of 0.5 to 1 s each at 4,000 ops, most of it `transfers.place` and the referee.

Imperfect: nothing is proven but that the plan keeps its budgets; steps of the search are coarse.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from remat_graph import Links
from remat_solvers.attempt import PERIODS, Attempt, attempt
from remat_solvers.gaps import Gap
from remat_solvers.homes import Program, Terms, whole_params
from remat_solvers.ladder import Ladder, repeats
from remat_solvers.neighbours import neighbours
from remat_solvers.protocol import Deadline, Problem, Solution, Status
from remat_solvers.reasons import explain, statistics
from remat_solvers.runs import params_of, runs_of
from remat_solvers.stepping import Style
from remat_solvers.transfers import WAYS, Way

__all__ = ["PERIODS", "Offload"]

RUNS = 32  # of parameters, for the program
REPAIRS = 5  # programs with lowered budgets
WORTH = 0.02  # of a step's time, for which parameters and states leave a device that has room for them all
STREAMS_IN_BACKWARD = 0.97  # of the time without, that streaming beside the backward must promise to be tried
MARGIN = 0.002  # of a budget, by which a repair asks for more than was missing
GRID = 40  # shares on the host that the search tells apart
TRIALS = 200_000  # attempts times squared ops, for what is only worth it on short orders
RUNGS = 40  # orders all over the range, of these
STARTS = 10  # orders whose moves are thinned
STEPS = (8, 24, 48)  # parts of the range of orders by which the search goes on


@attrs.frozen(kw_only=True)
class Offload:
    """Plans of a training step that recompute and move.

    Attributes:
        in_backward: whether the optimizer steps during the backward.
        accumulate: whether the plan must hold where gradients are there already; without effect for
            `in_backward`, where none stays.
        micro_batches: forwards and backwards to a step of the optimizer; within the backward, the last one's.
        homes: values at home on the host, if that is settled already.
        attempts: schedules to try, at most; on short orders `TRIALS` adds to them.
    """

    name: ClassVar[str] = "offload"

    in_backward: bool = False
    accumulate: bool = True
    micro_batches: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    homes: frozenset[int] | None = None
    attempts: int = attrs.field(default=40, validator=attrs.validators.ge(1))

    @property
    def style(self) -> Style:
        """How the step is trained."""
        return Style(
            in_backward=self.in_backward, accumulate=self.accumulate, micro_batches=self.micro_batches
        )

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Find the fastest plan of a training graph (`remat_graph.training`) that keeps both budgets.

        The result's `time_s` is that of a whole step with its updates, the one before it still under way.

        Where nothing is found, `least_nbytes` and `least_host_nbytes` are budgets for which something is,
        neither below the problem's; where `sufficient` is false, the best guess at them.
        """
        deadline = deadline or Deadline()
        ladder = Ladder(problem.graph, self.style, deadline)
        found = _Search(self, problem, deadline, ladder).run()
        return found if found.feasible else self._shortage(problem, found, ladder)

    def _shortage(self, problem: Problem, found: Solution, ladder: Ladder) -> Solution:
        """Say which budgets would do: with others the search goes other ways, so they are tried."""
        enough, seen = problem, found
        for _ in range(REPAIRS):
            enough = _with_room(enough, seen.stats)
            seen = _Search(self, enough, Deadline(0.0), ladder).run()
            if seen.feasible:
                break
        least = {"least_nbytes": enough.budget_nbytes, "sufficient": seen.feasible}
        if enough.host_budget_nbytes is not None:
            least["least_host_nbytes"] = enough.host_budget_nbytes
        return attrs.evolve(found, stats={**found.stats, **least})

    @staticmethod
    def explain(stats: Mapping[str, Any]) -> tuple[str, ...]:
        """Why each class of tensor is where it is, in a few lines; nothing where nothing was found.

        Args:
            stats: of a solution, or of the plan that was made of it.
        """
        return tuple(str(stats.get("why", "")).splitlines())


def _with_room(problem: Problem, stats: Mapping[str, Any]) -> Problem:
    """The same with budgets for what came closest to them."""
    host_nbytes = problem.host_budget_nbytes
    if host_nbytes is not None:
        host_nbytes = max(host_nbytes, stats["least_host_nbytes"])
    device_nbytes = max(problem.budget_nbytes, stats["least_nbytes"])
    return attrs.evolve(problem, budget_nbytes=device_nbytes, host_budget_nbytes=host_nbytes)


class _Search:
    """One search: what was tried, and the best of it."""

    def __init__(self, solver: Offload, problem: Problem, deadline: Deadline, ladder: Ladder) -> None:
        self.solver, self.problem, self.deadline = solver, problem, deadline
        self.style = solver.style
        self.params = params_of(problem.graph)
        self.ladder = ladder
        self.tried: dict[tuple[frozenset[int], tuple[int, ...], frozenset[Gap]], Attempt] = {}
        self.best: Attempt | None = None
        self.limit = solver.attempts
        self.base_s = problem.graph.time_s * solver.micro_batches

    def run(self) -> Solution:
        """Search."""
        if self.solver.homes is not None:
            self.explore(self.solver.homes, None, STEPS)
        else:
            if self.may_fit(frozenset()):
                self.explore(frozenset(), None, STEPS)
            if self.problem.links is not None and self.params and not self.at_ease():
                self.move()
                if self.best is None:  # so that it can be said what would do
                    self.attempt(self.everything(), 0)
                self.refine()
        if self.best is not None and self.problem.links is not None and self.lost_s(self.best) > 0.0:
            self.deepen(self.best.on_host)
        return self.solution()

    def at_ease(self) -> bool:
        """Whether a plan without homes on the host costs nothing: then nothing need move."""
        return self.best is not None and self.lost_s(self.best) <= WORTH * self.base_s

    def lost_s(self, one: Attempt) -> float:
        """Seconds of repeats and waits."""
        return one.timeline.recomputed_s + sum(one.timeline.waited_s.values())

    def everything(self) -> frozenset[int]:
        """All that can be at home on the host."""
        return frozenset(v for param in self.params for v in (param.index, *param.states))

    def over(self) -> bool:
        """Whether the search must end; never before the first attempt."""
        return bool(self.tried) and (
            len(self.tried) >= self.limit or (self.best is not None and self.deadline.reached())
        )

    # -- homes

    def move(self) -> None:
        """Let parameters and states have their home on the host."""
        terms = Terms(
            device_nbytes=self.problem.budget_nbytes,
            host_nbytes=self.problem.host_budget_nbytes,
            links=self.problem.links or Links(),
            style=self.style,
            curve=self.ladder.curve(),
            floor_nbytes=self.ladder.floor_nbytes,
        )
        program = Program(self.problem.graph, runs_of(self.params, RUNS), terms)
        plain = attrs.evolve(terms, streams=False)
        without, streamed = program.share_out(plain), program.share_out(terms)
        enough = STREAMS_IN_BACKWARD if self.style.in_backward else 1.0
        if streamed is not None and without is not None and streamed.time_s < enough * without.time_s:
            self.repair(program, terms)
        if without is not None or streamed is None:
            terms = plain
        self.repair(program, terms)
        if self.best is None:
            for share in (1.0, 0.75, 0.5, 0.25):
                self.by_program(program, terms, share, STEPS[:1])
        self.climb(program, terms)
        if self.best is not None and not self.over():
            self.explore(self.best.on_host, self.best.activation_nbytes, STEPS[1:])

    def climb(self, program: Program, terms: Terms) -> None:
        """A little more and a little less on the host, in finer and finer steps."""
        seen: set[int] = set()
        for step in (4, 2, 1):
            before = None
            while self.best is not None and self.best.on_host and before is not self.best:
                before = self.best
                here = round(self.moved(before.on_host) * GRID)
                for share in (here + step, here - step):
                    if 0 < share <= GRID and share not in seen and not self.over():
                        seen.add(share)
                        self.by_program(program, terms, share / GRID, ())

    def refine(self) -> None:
        """Give one parameter or two another fate, as long as that is better; for steps of few ops."""
        self.allow_trials()
        here, before = min(self.tried.values(), key=self.rank), None
        while here is not before:
            before = here
            for homes in neighbours(self.params, before.on_host):
                if self.over():
                    return
                found = [
                    self.attempt(homes, before.activation_nbytes),
                    self.explore(homes, None, STEPS[:1]),
                ]
                here = min((before, *found), key=self.rank)
                if here is not before:
                    break
        if here.fits:
            self.explore(here.on_host, here.activation_nbytes, STEPS)

    def allow_trials(self) -> None:
        """Let more be tried, the more the fewer ops there are: both attempts and choices grow with them."""
        self.limit = len(self.tried) + TRIALS // max(1, len(self.problem.graph.ops)) ** 2

    def repair(self, program: Program, terms: Terms) -> None:
        """Explore what the program says, its budgets lowered until it holds."""
        device_cut = host_cut = 0.0
        for _ in range(REPAIRS):
            host_nbytes = None if terms.host_nbytes is None else int(terms.host_nbytes * (1 - host_cut))
            device_nbytes = int(terms.device_nbytes * (1 - device_cut))
            lowered = attrs.evolve(terms, device_nbytes=device_nbytes, host_nbytes=host_nbytes)
            found = self.by_program(program, lowered, None, STEPS[1:2])
            if self.over() or (found is not None and found.fits):
                return
            if found is None:  # too much asked for: what was found above the budgets is not all to blame
                device_cut, host_cut = device_cut / 2, host_cut / 2
                continue
            if found.over_nbytes > 0:
                device_cut += found.over_nbytes / terms.device_nbytes + MARGIN
            if found.over_host_nbytes > 0 and terms.host_nbytes is not None:
                host_cut += found.over_host_nbytes / terms.host_nbytes + MARGIN

    def moved(self, on_host: frozenset[int]) -> float:
        """Which part of the bytes that can be at home on the host is."""
        whole = sum(param.charge_nbytes for param in self.params)
        return sum(self.problem.graph.values[v].nbytes for v in on_host) / max(1, whole)

    def by_program(
        self, program: Program, terms: Terms, moved: float | None, steps: tuple[int, ...]
    ) -> Attempt | None:
        """Explore the homes that the program says."""
        shared = program.share_out(terms, moved)
        if shared is None:
            return None
        params, streamed = whole_params(program.runs, shared.shares)
        states = {v for param in self.params if param.index in params | streamed for v in param.states}
        return self.explore(params | states, shared.activation_nbytes, steps)

    def held_nbytes(self, on_host: frozenset[int]) -> int:
        """Bytes at home on the device."""
        values = enumerate(self.problem.graph.values)
        return sum(v.nbytes for i, v in values if v.home is not None and i not in on_host)

    def may_fit(self, on_host: frozenset[int]) -> bool:
        """Whether the op that needs most has room beside what is at home on the device."""
        held = self.held_nbytes(on_host)
        return held + self.ladder.floor_nbytes <= self.problem.budget_nbytes

    # -- orders

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

    def deepen(self, on_host: frozenset[int]) -> None:
        """Try orders all over the range, and go on from the best of them; for steps of few ops."""
        low, high = self.ladder.least.nbytes, self.ladder.top.nbytes
        self.allow_trials()
        for part in range(RUNGS, -1, -1):
            if not self.over():
                self.attempt(on_host, low + (high - low) * part // RUNGS)
        starts = [one for one in self.tried.values() if one.fits and one.on_host == on_host]
        self.allow_trials()
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

    # -- the answer

    def solution(self) -> Solution:
        """What a caller gets."""
        base_s, best = self.base_s, self.best
        stats: dict[str, Any] = {"tried": len(self.tried), "deadline": self.deadline.hit}
        if self.tried:
            closest = min(self.tried.values(), key=lambda one: self.rank(one)[0])
            stats |= {"least_nbytes": closest.nbytes, "least_host_nbytes": closest.host_nbytes}
        else:
            held = self.held_nbytes(frozenset())
            stats |= {"least_nbytes": held + self.ladder.floor_nbytes, "least_host_nbytes": 0}
        if best is None:
            return Solution(
                status=Status.NOT_FOUND, schedule=None, lower_bound_s=base_s, base_s=base_s, stats=stats
            )
        notes = explain(best, self.problem.budget_nbytes, self.ladder.floor_nbytes)
        return Solution(
            status=Status.FEASIBLE,
            schedule=best.schedule,
            lower_bound_s=min(base_s, best.timeline.time_s),
            base_s=base_s,
            time_s=best.timeline.time_s,
            peak_nbytes=best.nbytes,
            stats=stats | statistics(best) | {"why": "\n".join(notes)},
            on_host=best.on_host,
        )
