"""`monet`: one integer program that chooses schedule and operator implementations together.

Shah et al. 2021, "Memory optimization for deep networks" (MONeT, ICLR). The program is Checkmate's, in the
stage form of `mip.stage_program`, with the paper's choice variables: one alternative for each way to run an
op, of which exactly one is in force. The ways here are those of the graph's switches: all ops of a switch
agree, and an op repeats in the way of its first run. (In the paper each repeat chooses by itself, because a
kernel's choice there changes no other op.) The solver therefore plans graphs with switches by itself; without
any, it is `checkmate`.

``without`` leaves families of switches out, for the paper's ablations.

Exact in its own space, as `checkmate` is, and in about the same time for each way: some 30 s at 90 ops with
HiGHS. Its bound is that of the relaxed graph, which holds for all schedules.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import attrs

from remat_graph import Graph, Schedule, Specialized, relaxed, specialize
from remat_graph.errors import shown
from remat_graph.switches.families import check_families
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import Floats
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.mip.choice_step import ChoiceStep, choice_step
from remat_solvers.mip.cvxpy_backend import minimize_with_cvxpy, order_of
from remat_solvers.mip.stage_program import DeadlineReached, StageProgram, stage_program
from remat_solvers.protocol import Deadline, Problem, Solution, judge_schedule


def _names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of families; a single string is no list of them."""
    found = () if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"without must be a list of families, such as ['masks'], got {shown(names)}")
    return found


@attrs.frozen(kw_only=True)
class Monet:
    """The exact program of the stage form with a choice of implementations.

    Attributes:
        backend: name of a mixed-integer solver that cvxpy has installed.
        gap: ratio of the program's cost at which the solver may stop.
        without: families of switches that stay off.
    """

    name: ClassVar[str] = "monet"
    plans_switches: ClassVar[bool] = True
    backend: str = "HIGHS"
    gap: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    without: tuple[str, ...] = attrs.field(default=(), converter=_names)

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring.

        Raises:
            UnknownFamily: the graph has no switch of a family in `without`.
        """
        deadline = deadline or Deadline()
        graph, budget = problem.graph, problem.budget_nbytes
        check_families(graph, self.without)
        if not graph.switches:
            return Checkmate(backend=self.backend, gap=self.gap).solve(problem, deadline)
        least = relaxed(graph)
        if budget < budget_floor(least).nbytes:
            return self._judged(problem, None, least, {"proven": True})
        step = choice_step(graph, self.without)
        # Solvers keep rows to about 1e-6 of the budget; if a plan exceeds it by that, retry with a margin.
        stats: dict[str, int | float | str | bool] = {}
        for limit in (budget, budget - budget // 100_000 - 1):
            schedule, stats = self._planned(graph, step, limit, deadline)
            stats["proven"] = bool(stats["proven"]) and limit == budget
            solution = self._judged(problem, schedule, least, stats)
            if schedule is None or solution.feasible:
                break
        if deadline.seconds is not None and not stats["proven"]:
            deadline.reached()
        return solution

    def _planned(
        self, graph: Graph, step: ChoiceStep, limit_nbytes: int, deadline: Deadline
    ) -> tuple[Schedule | None, dict[str, int | float | str | bool]]:
        """The schedule of the program's solution, if it has one."""
        try:
            program = stage_program(step.work, limit_nbytes, deadline)
            found, cost_s, proven = minimize_with_cvxpy(
                program, whole=True, solver=self.backend, deadline=deadline, gap=self.gap
            )
        except DeadlineReached:
            return None, {"proven": False}
        stats: dict[str, int | float | str | bool] = {"variables": len(program.cost), "proven": proven}
        if found is None:
            return None, stats
        frontiers = _frontiers(step, program, found)
        made = specialize(graph, step.chosen(frontiers))
        kept = [pair for pair, column in program.kept.items() if found[column] > 0.5]
        order = order_of(step.work, kept, frontiers)
        stats |= {"program_cost_s": cost_s, "switched": ", ".join(sorted(made.on))}
        return _schedule(step, made, order), stats

    def _judged(
        self,
        problem: Problem,
        schedule: Schedule | None,
        least: Graph,
        stats: dict[str, int | float | str | bool],
    ) -> Solution:
        solution = judge_schedule(problem, schedule, stats=stats)
        least_s = least.time_s if solution.time_s is None else min(least.time_s, solution.time_s)
        return attrs.evolve(solution, lower_bound_s=least_s)


def _frontiers(step: ChoiceStep, program: StageProgram, found: Floats) -> list[int]:
    """Per stage the way that is in force."""
    return [
        max(ways, key=lambda way: found[program.runs[t, way]]) if len(ways) > 1 else ways[0]
        for t, ways in enumerate(step.work.groups)
    ]


def _schedule(step: ChoiceStep, made: Specialized, order: Sequence[int]) -> Schedule:
    """The schedule of an order of ways; ops that run nothing are left out, and put back in their places."""
    place = {op: n for n, op in enumerate(made.ops)}
    ops = (step.work.group_of[way] for way in order)
    return made.restore(Schedule.from_order(made.graph, [place[op] for op in ops if op in place]))
