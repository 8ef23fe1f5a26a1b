"""Plan recomputation and offloading together: placement on the host, order of ops, and copies.

A plan makes three choices. Placement: parameters, gradients and optimizer states are on the device, on the
host, or divided, with states that pass through the device (`placement_lp`, a linear program). Order: which
ops run when, with which repeats (`order_frontier`). Swaps: which activations are copied to the host and back
instead of being recomputed (`transfers.placement`). The referee times each combination over several
consecutive steps (`candidate`), and the fastest that keeps both budgets is taken.

The search starts with everything on the device, if that fits. Next comes the program's placement, its budgets
lowered by the excess that the referee finds until the plan fits; then a little more and a little less on the
host, each with the order that the program chooses; from the best candidates on, orders in either direction
while the time falls. For short graphs up to three parameters at a time then change their placement while that
helps, and more orders are tried (`candidates`). A plan without offloading is preferred unless offloading
saves at least `WORTH` of the step time. Some 15 candidates of 0.5 to 1 s each at 4,000 ops, most of it for
copies and the referee.

Imperfect: nothing is proven except that the plan keeps its budgets; steps of the search are coarse.
"""

from typing import Any, ClassVar

import attrs

from remat_graph import Links
from remat_solvers.offload.candidate import Candidate
from remat_solvers.offload.candidates import WORTH, CandidateSearch
from remat_solvers.offload.explain import explain, statistics
from remat_solvers.offload.order_frontier import OrderFrontier
from remat_solvers.offload.parameter_groups import parameter_groups, params_of
from remat_solvers.offload.placement_lp import PlacementLimits, PlacementProgram, whole_params
from remat_solvers.offload.placement_neighbors import placement_neighbors
from remat_solvers.offload.training_problem import UpdateMode
from remat_solvers.protocol import MOST_PASSES, Deadline, Problem, Shortage, Solution, Status, limited_count

GROUPS = 32  # most groups of parameters in the program
REPAIRS = 5  # programs with lowered budgets
STREAMS_IN_BACKWARD = 0.97  # streaming in the backward is tried if it promises this part of the time without
MARGIN = 0.002  # of a budget: a repair lowers the budget by this much more than the excess
GRID = 40  # host shares that the search distinguishes
BEST_PLACEMENTS = 3  # placements around whose best order others are tried at the end
SHORT = 500  # ops, up to which orders are tried for every placement
STEPS = (8, 24, 48)  # step sizes of the search over orders, as parts of their range


@attrs.frozen(kw_only=True)
class Offload:
    """Plan a training step with recomputation and offloading.

    Attributes:
        in_backward: whether the optimizer steps during the backward.
        accumulate: whether the plan must hold where gradients exist already; without effect for
            `in_backward`, where none stays.
        micro_batches: forwards and backwards per optimizer step; with `in_backward` it steps in the last one.
        on_host: values placed on the host, if the placement is fixed already.
        candidates: most schedules to evaluate; short orders allow more (`candidates.CandidateSearch`).
    """

    name: ClassVar[str] = "offload"

    in_backward: bool = False
    accumulate: bool = True
    micro_batches: int = limited_count(1, 1, MOST_PASSES)
    on_host: frozenset[int] | None = None
    candidates: int = attrs.field(default=40, validator=attrs.validators.ge(1))

    @property
    def mode(self) -> UpdateMode:
        """How the step is trained."""
        return UpdateMode(
            in_backward=self.in_backward, accumulate=self.accumulate, micro_batches=self.micro_batches
        )

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Find the fastest plan of a training graph (`remat_graph.training`) that keeps both budgets.

        The result's `time_s` is that of a whole step with its updates, while the step before is pending.
        """
        deadline = deadline or Deadline()
        frontier = OrderFrontier(problem.graph, self.mode, deadline)
        found = _PlacementSearch(self, problem, deadline, frontier).run()
        if found.shortage is None:
            return found
        return attrs.evolve(found, shortage=self._shortage(problem, found.shortage, frontier))

    def _shortage(self, problem: Problem, closest: Shortage, frontier: OrderFrontier) -> Shortage:
        """Try the budgets of the closest candidates, since other budgets lead the search to other paths."""
        nbytes, host_nbytes = problem.budget_nbytes, problem.host_budget_nbytes
        short: Shortage | None = closest
        for _ in range(REPAIRS):
            if short is None:
                break
            nbytes = max(nbytes, short.nbytes)
            host_nbytes = None if host_nbytes is None else max(host_nbytes, short.host_nbytes)
            if frontier.deadline.reached():
                break
            larger = attrs.evolve(problem, budget_nbytes=nbytes, host_budget_nbytes=host_nbytes)
            short = _PlacementSearch(self, larger, frontier.deadline, frontier, first_fit=True).run().shortage
        return Shortage(
            nbytes=nbytes,
            host_nbytes=closest.host_nbytes if host_nbytes is None else host_nbytes,
            sufficient=short is None,
        )


class _PlacementSearch:
    """One search over placements, for one pair of budgets."""

    def __init__(
        self,
        solver: Offload,
        problem: Problem,
        deadline: Deadline,
        frontier: OrderFrontier,
        *,
        first_fit: bool = False,
    ) -> None:
        self.solver, self.problem, self.deadline, self.frontier = solver, problem, deadline, frontier
        self.params = params_of(problem.graph)
        self.search = CandidateSearch(
            problem, solver.mode, frontier, deadline, solver.candidates, first_fit=first_fit
        )
        self.thorough = len(problem.graph.ops) <= SHORT

    @property
    def best(self) -> Candidate | None:
        """The best candidate so far."""
        return self.search.best

    def run(self) -> Solution:
        """Search."""
        if self.solver.on_host is not None:
            self.search.explore(self.solver.on_host, None, STEPS)
        else:
            held = self.search.held_nbytes(frozenset())
            if held + self.frontier.floor_nbytes <= self.problem.budget_nbytes:
                self.search.explore(frozenset(), None, STEPS)
            if self.problem.links is not None and self.params and not self.worth_no_offloading():
                if not self.search.must_stop() or not self.search.evaluated:
                    self.search_placements()
                if self.best is None:  # to find out which budgets would do
                    everything = frozenset(v for param in self.params for v in (param.index, *param.states))
                    self.search.evaluate(everything, 0)
                if not self.search.must_stop():
                    self.try_neighbors()
        best = self.best
        loses = best is not None and self.search.overhead_s(best) > 0.0
        if best is not None and loses and self.problem.links is not None and not self.search.must_stop():
            self.search.search_orders(best.on_host)
        return self.solution()

    def worth_no_offloading(self) -> bool:
        """Whether a plan without offloading costs so little that offloading cannot pay."""
        return self.best is not None and self.search.overhead_s(self.best) <= WORTH * self.search.base_s

    def search_placements(self) -> None:
        """Search placements with parameters and states on the host."""
        limits = PlacementLimits(
            device_nbytes=self.problem.budget_nbytes,
            host_nbytes=self.problem.host_budget_nbytes,
            links=self.problem.links or Links(),
            mode=self.solver.mode,
            curve=self.frontier.curve(),
            floor_nbytes=self.frontier.floor_nbytes,
        )
        program = PlacementProgram(self.problem.graph, parameter_groups(self.params, GROUPS), limits)
        plain = attrs.evolve(limits, streams=False)
        without, streamed = program.solve(plain), program.solve(limits)
        enough = STREAMS_IN_BACKWARD if self.solver.mode.in_backward else 1.0
        if streamed is not None and without is not None and streamed.time_s < enough * without.time_s:
            self.repair(program, limits)
        if without is not None or streamed is None:
            limits = plain
        self.repair(program, limits)
        if self.best is None:
            for share in (1.0, 0.75, 0.5, 0.25):
                if self.search.exhausted():
                    return
                self.explore_program(program, limits, share, STEPS[:1])
        self.vary_host_share(program, limits)
        for candidate in self.search.best_per_placement(BEST_PLACEMENTS):
            if self.best is not None and not self.search.exhausted():
                self.search.explore(candidate.on_host, candidate.activation_nbytes, STEPS[1:])

    def vary_host_share(self, program: PlacementProgram, limits: PlacementLimits) -> None:
        """Try a little more and a little less on the host, in finer and finer steps."""
        near = STEPS[1:2] if self.thorough else ()
        seen: set[int] = set()
        for step in (4, 2, 1):
            before = None
            while self.best is not None and self.best.on_host and before is not self.best:
                before = self.best
                here = round(self.host_share(before.on_host) * GRID)
                for share in (here + step, here - step):
                    if 0 < share <= GRID and share not in seen and not self.search.exhausted():
                        seen.add(share)
                        self.explore_program(program, limits, share / GRID, near)

    def try_neighbors(self) -> None:
        """Change the placement of up to three parameters while that helps; for graphs of few ops."""
        self.search.extend_limit()
        here, before = min(self.search.evaluated.values(), key=self.search.sort_key), None
        while here is not before:
            before = here
            for on_host in placement_neighbors(self.params, before.on_host):
                if self.search.exhausted():
                    return
                found = [
                    self.search.evaluate(on_host, before.activation_nbytes),
                    self.search.explore(on_host, None, STEPS[:1]),
                ]
                here = min((before, *found), key=self.search.sort_key)
                if here is not before:
                    break
        if here.fits:
            self.search.explore(here.on_host, here.activation_nbytes, STEPS)

    def repair(self, program: PlacementProgram, limits: PlacementLimits) -> None:
        """Explore the program's placement, with budgets lowered until the referee agrees."""
        device_cut = host_cut = 0.0
        for _ in range(REPAIRS):
            host_nbytes = None if limits.host_nbytes is None else int(limits.host_nbytes * (1 - host_cut))
            device_nbytes = int(limits.device_nbytes * (1 - device_cut))
            lowered = attrs.evolve(limits, device_nbytes=device_nbytes, host_nbytes=host_nbytes)
            found = self.explore_program(program, lowered, None, STEPS[:2] if self.thorough else ())
            if found is not None and found.over_nbytes <= 0 and not self.thorough:
                found = self.search.explore(found.on_host, found.activation_nbytes, STEPS[1:2])
            if self.search.exhausted() or (found is not None and found.fits):
                return
            if found is None:  # infeasible: the excess found before overestimates what is missing
                device_cut, host_cut = device_cut / 2, host_cut / 2
                continue
            if found.over_nbytes > 0:
                device_cut += found.over_nbytes / limits.device_nbytes + MARGIN
            if found.over_host_nbytes > 0 and limits.host_nbytes is not None:
                host_cut += found.over_host_nbytes / limits.host_nbytes + MARGIN

    def host_share(self, on_host: frozenset[int]) -> float:
        """The share of the movable bytes that is placed on the host."""
        whole = sum(param.charge_nbytes for param in self.params)
        return sum(self.problem.graph.values[v].nbytes for v in on_host) / max(1, whole)

    def explore_program(
        self,
        program: PlacementProgram,
        limits: PlacementLimits,
        host_share: float | None,
        steps: tuple[int, ...],
    ) -> Candidate | None:
        """Explore the placement that the program chooses."""
        shared = program.solve(limits, host_share)
        if shared is None:
            return None
        params, streamed = whole_params(program.groups, shared.shares)
        states = {v for param in self.params if param.index in params | streamed for v in param.states}
        return self.search.explore(params | states, shared.activation_nbytes, steps)

    def solution(self) -> Solution:
        """The result of the search."""
        base_s, best = self.search.base_s, self.best
        stats: dict[str, Any] = {"tried": len(self.search.evaluated), "deadline": self.deadline.hit}
        if self.search.evaluated:
            closest = min(self.search.evaluated.values(), key=lambda one: self.search.sort_key(one)[0])
            nbytes, host_nbytes = closest.nbytes, closest.host_nbytes
        else:
            nbytes, host_nbytes = self.search.held_nbytes(frozenset()) + self.frontier.floor_nbytes, 0
        if best is None:
            return Solution(
                status=Status.NOT_FOUND,
                schedule=None,
                lower_bound_s=base_s,
                base_s=base_s,
                stats=stats,
                shortage=Shortage(nbytes=nbytes, host_nbytes=host_nbytes, sufficient=False),
            )
        stats |= {"least_nbytes": nbytes, "least_host_nbytes": host_nbytes}
        return Solution(
            status=Status.FEASIBLE,
            schedule=best.schedule,
            lower_bound_s=min(base_s, best.timeline.time_s),
            base_s=base_s,
            time_s=best.timeline.time_s,
            peak_nbytes=best.nbytes,
            stats=stats | statistics(best),
            on_host=best.on_host,
            explanation=explain(best, self.problem.budget_nbytes, self.frontier.floor_nbytes),
        )
