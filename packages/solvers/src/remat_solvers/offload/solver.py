"""Recompute and move: who is placed on the host, in which order to compute, and when to copy.

A plan has three choices. Where parameters, gradients and optimizer states are at home: on the device, on
the host, or split, the states passing through the device (`placement_lp`, a linear program). In which order
to compute, with which repeats (`order_frontier`). And which activations go to the host and back instead of
being made again: `transfers.place` moves what an order does not have the room to keep. Each combination is
timed by the referee over several steps after each other (`candidate`), and the fastest that keeps both
budgets is taken.

The search: everything placed on the device, if that fits; what the program says, its budgets lowered by
what the referee finds above them until it fits; then a little more and a little less on the host, each with
the order that the program would take; from the best ones on, orders in either direction while that is faster.
Where attempts are cheap, up to three parameters at a time then change their homes while that is better, and
more orders are tried (`candidates`).
What is not moved is worth a little: homes on the host must bring `WORTH` of the step against none at all.
Some 15 attempts of 0.5 to 1 s each at 4,000 ops, most of it `transfers.place` and the referee.

Imperfect: nothing is proven but that the plan keeps its budgets; steps of the search are coarse.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from remat_graph import Links
from remat_solvers.offload.candidate import PERIODS, Attempt
from remat_solvers.offload.candidates import WORTH, Trials
from remat_solvers.offload.explain import explain, statistics
from remat_solvers.offload.order_frontier import Ladder
from remat_solvers.offload.parameter_groups import params_of, runs_of
from remat_solvers.offload.placement_lp import Program, Terms, whole_params
from remat_solvers.offload.placement_neighbors import neighbours
from remat_solvers.offload.training_problem import Style
from remat_solvers.protocol import MOST_PASSES, Deadline, Problem, Solution, Status, between

__all__ = ["PERIODS", "WORTH", "Offload"]

RUNS = 32  # of parameters, for the program
REPAIRS = 5  # programs with lowered budgets
STREAMS_IN_BACKWARD = 0.97  # of the time without, that streaming beside the backward must promise to be tried
MARGIN = 0.002  # of a budget, by which a repair asks for more than was missing
GRID = 40  # shares on the host that the search tells apart
LEADERS = 3  # choices of homes around whose best order others are tried at the end
SHORT = 500  # ops, up to which orders are tried around every choice of homes
STEPS = (8, 24, 48)  # parts of the range of orders by which the search goes on


@attrs.frozen(kw_only=True)
class Offload:
    """Plans of a training step that recompute and move.

    Attributes:
        in_backward: whether the optimizer steps during the backward.
        accumulate: whether the plan must hold where gradients are there already; without effect for
            `in_backward`, where none stays.
        micro_batches: forwards and backwards to a step of the optimizer; within the backward, the last one's.
        on_host: values placed on the host, if that is settled already.
        attempts: schedules to try, at most; on short orders more are allowed (`candidates`).
    """

    name: ClassVar[str] = "offload"

    in_backward: bool = False
    accumulate: bool = True
    micro_batches: int = attrs.field(default=1, validator=between(1, MOST_PASSES))
    on_host: frozenset[int] | None = None
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
            if ladder.deadline.reached():
                break
            seen = _Search(self, enough, ladder.deadline, ladder, any_will_do=True).run()
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

    def __init__(
        self,
        solver: Offload,
        problem: Problem,
        deadline: Deadline,
        ladder: Ladder,
        *,
        any_will_do: bool = False,
    ) -> None:
        self.solver, self.problem, self.deadline, self.ladder = solver, problem, deadline, ladder
        self.params = params_of(problem.graph)
        self.trials = Trials(
            problem, solver.style, ladder, deadline, solver.attempts, any_will_do=any_will_do
        )
        self.closely = len(problem.graph.ops) <= SHORT

    @property
    def best(self) -> Attempt | None:
        """The best of what was tried."""
        return self.trials.best

    def run(self) -> Solution:
        """Search."""
        if self.solver.on_host is not None:
            self.trials.explore(self.solver.on_host, None, STEPS)
        else:
            if self.may_fit(frozenset()):
                self.trials.explore(frozenset(), None, STEPS)
            if self.problem.links is not None and self.params and not self.at_ease():
                if not self.trials.done() or not self.trials.tried:
                    self.move()
                if self.best is None:  # so that it can be said what would do
                    self.trials.attempt(self.everything(), 0)
                if not self.trials.done():
                    self.refine()
        best = self.best
        loses = best is not None and self.trials.lost_s(best) > 0.0
        if best is not None and loses and self.problem.links is not None and not self.trials.done():
            self.trials.deepen(best.on_host)
        return self.solution()

    def at_ease(self) -> bool:
        """Whether a plan without homes on the host costs nothing: then nothing need move."""
        return self.best is not None and self.trials.lost_s(self.best) <= WORTH * self.trials.base_s

    def everything(self) -> frozenset[int]:
        """All that can be placed on the host."""
        return frozenset(v for param in self.params for v in (param.index, *param.states))

    # -- homes

    def move(self) -> None:
        """Let parameters and states have their home on the host."""
        terms = Terms(
            device_nbytes=self.problem.budget_nbytes,
            host_nbytes=self.problem.host_budget_nbytes,
            links=self.problem.links or Links(),
            style=self.solver.style,
            curve=self.ladder.curve(),
            floor_nbytes=self.ladder.floor_nbytes,
        )
        program = Program(self.problem.graph, runs_of(self.params, RUNS), terms)
        plain = attrs.evolve(terms, streams=False)
        without, streamed = program.share_out(plain), program.share_out(terms)
        enough = STREAMS_IN_BACKWARD if self.solver.style.in_backward else 1.0
        if streamed is not None and without is not None and streamed.time_s < enough * without.time_s:
            self.repair(program, terms)
        if without is not None or streamed is None:
            terms = plain
        self.repair(program, terms)
        if self.best is None:
            for share in (1.0, 0.75, 0.5, 0.25):
                if self.trials.over():
                    return
                self.by_program(program, terms, share, STEPS[:1])
        self.climb(program, terms)
        for leader in self.trials.leaders(LEADERS):
            if self.best is not None and not self.trials.over():
                self.trials.explore(leader.on_host, leader.activation_nbytes, STEPS[1:])

    def climb(self, program: Program, terms: Terms) -> None:
        """A little more and a little less on the host, in finer and finer steps."""
        near = STEPS[1:2] if self.closely else ()
        seen: set[int] = set()
        for step in (4, 2, 1):
            before = None
            while self.best is not None and self.best.on_host and before is not self.best:
                before = self.best
                here = round(self.moved(before.on_host) * GRID)
                for share in (here + step, here - step):
                    if 0 < share <= GRID and share not in seen and not self.trials.over():
                        seen.add(share)
                        self.by_program(program, terms, share / GRID, near)

    def refine(self) -> None:
        """Give one parameter or two another fate, as long as that is better; for steps of few ops."""
        self.trials.allow_more()
        here, before = min(self.trials.tried.values(), key=self.trials.rank), None
        while here is not before:
            before = here
            for homes in neighbours(self.params, before.on_host):
                if self.trials.over():
                    return
                found = [
                    self.trials.attempt(homes, before.activation_nbytes),
                    self.trials.explore(homes, None, STEPS[:1]),
                ]
                here = min((before, *found), key=self.trials.rank)
                if here is not before:
                    break
        if here.fits:
            self.trials.explore(here.on_host, here.activation_nbytes, STEPS)

    def repair(self, program: Program, terms: Terms) -> None:
        """Explore what the program says, its budgets lowered until it holds."""
        device_cut = host_cut = 0.0
        for _ in range(REPAIRS):
            host_nbytes = None if terms.host_nbytes is None else int(terms.host_nbytes * (1 - host_cut))
            device_nbytes = int(terms.device_nbytes * (1 - device_cut))
            lowered = attrs.evolve(terms, device_nbytes=device_nbytes, host_nbytes=host_nbytes)
            found = self.by_program(program, lowered, None, STEPS[:2] if self.closely else ())
            if found is not None and found.over_nbytes <= 0 and not self.closely:
                found = self.trials.explore(found.on_host, found.activation_nbytes, STEPS[1:2])
            if self.trials.over() or (found is not None and found.fits):
                return
            if found is None:  # too much asked for: what was found above the budgets is not all to blame
                device_cut, host_cut = device_cut / 2, host_cut / 2
                continue
            if found.over_nbytes > 0:
                device_cut += found.over_nbytes / terms.device_nbytes + MARGIN
            if found.over_host_nbytes > 0 and terms.host_nbytes is not None:
                host_cut += found.over_host_nbytes / terms.host_nbytes + MARGIN

    def moved(self, on_host: frozenset[int]) -> float:
        """Which part of the bytes that can be placed on the host is."""
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
        return self.trials.explore(params | states, shared.activation_nbytes, steps)

    def may_fit(self, on_host: frozenset[int]) -> bool:
        """Whether the op that needs most has room beside what is placed on the device."""
        held = self.trials.held_nbytes(on_host)
        return held + self.ladder.floor_nbytes <= self.problem.budget_nbytes

    # -- the answer

    def solution(self) -> Solution:
        """What a caller gets."""
        base_s, best = self.trials.base_s, self.best
        stats: dict[str, Any] = {"tried": len(self.trials.tried), "deadline": self.deadline.hit}
        if self.trials.tried:
            closest = min(self.trials.tried.values(), key=lambda one: self.trials.rank(one)[0])
            stats |= {"least_nbytes": closest.nbytes, "least_host_nbytes": closest.host_nbytes}
        else:
            held = self.trials.held_nbytes(frozenset())
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
