"""Solve a stage program with a solver that cvxpy knows, and read the schedule from its solution."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from remat_solvers.bounds import budget_floor
from remat_solvers.errors import BadParameter
from remat_solvers.evaluation.arrays import Floats
from remat_solvers.mip.stage_program import (
    DeadlineReached,
    StagedStep,
    StageProgram,
    stage_program,
    staged_step,
)
from remat_solvers.protocol import Deadline, Problem, Solution, judge

TOLERANCE = 1e-4  # of rows and whole numbers; solvers keep them to about 1e-6


def order_of(
    work: StagedStep, kept: Iterable[tuple[int, int]], frontiers: Sequence[int] | None = None
) -> list[int]:
    """The fewest runs, stage by stage, that keep exactly these (stage, value) pairs.

    Args:
        work: the step.
        kept: of the program's solution.
        frontiers: per stage the op that is its frontier; needed where there are alternatives, of which the
            others do not run.
    """
    frontiers = range(len(work.groups)) if frontiers is None else frontiers
    stages, chosen = len(work.groups), frozenset(frontiers)
    live: list[set[int]] = [set() for _ in range(stages + 1)]
    for t, v in kept:
        live[t].add(v)
    maker = {v: op for v, ops in work.makers.items() for op in reversed(ops) if op in chosen}
    order: list[int] = []
    for t in range(stages):
        wanted = [frontiers[t], *(maker[v] for v in live[t + 1] - live[t] if v in maker)]
        runs: set[int] = set()
        while wanted:
            op = wanted.pop()
            if op in runs:
                continue
            runs.add(op)
            for v in work.reads[op]:
                if v in live[t] or (v in work.pinned and work.born(v) < t):
                    continue
                if v in maker and maker[v] not in runs:
                    wanted.append(maker[v])
        order += sorted(runs)
    return order


def minimize_with_cvxpy(
    program: StageProgram, *, whole: bool, solver: str, deadline: Deadline, gap: float = 0.0
) -> tuple[Floats | None, float, bool]:
    """Solve the program, or its relaxation if not `whole`, with a solver that cvxpy knows by name.

    Returns:
        the variables (None if none were found), their cost in seconds according to the solver, and whether it
        proved optimality or infeasibility.

    Raises:
        BadParameter: cvxpy has no such solver installed, or the solver is not for integers.
    """
    import cvxpy
    from cvxpy.reductions.solvers.defines import INSTALLED_MI_SOLVERS

    able = INSTALLED_MI_SOLVERS if whole else cvxpy.installed_solvers()
    if solver not in able:
        what = "mixed-integer solver" if whole else "solver"
        raise BadParameter(
            solver=solver, problem=f"cvxpy has no such {what} installed; choose from {', '.join(able)}"
        )
    count = len(program.cost)
    others = np.setdiff1d(np.arange(count), program.integral)
    if not count:
        return np.zeros(0), 0.0, True
    chosen = cvxpy.Variable(len(program.integral), boolean=whole) if len(program.integral) else None
    rest = cvxpy.Variable(len(others))
    rows: Sequence[Any] = [program.rows[:, others] @ rest]
    cost: Any = program.cost[others] @ rest
    bounds = [rest >= 0]
    finite = np.isfinite(program.upper[others])
    if finite.any():
        bounds.append(rest[np.flatnonzero(finite)] <= program.upper[others][finite])
    if chosen is not None:
        rows = [*rows, program.rows[:, program.integral] @ chosen]
        cost = cost + program.cost[program.integral] @ chosen
        if not whole:
            bounds += [chosen >= 0, chosen <= 1]
    problem = cvxpy.Problem(cvxpy.Minimize(cost), [sum(rows) <= program.limits, *bounds])
    if deadline.reached():
        return None, 0.0, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the result says whether a time limit cut in
            problem.solve(solver=solver, **_options(solver, whole, deadline, gap))
    except (cvxpy.SolverError, ValueError):  # ValueError: cvxpy cannot read the solver's state
        return None, 0.0, False
    if rest.value is None:
        return None, (np.inf if problem.status == "infeasible" else 0.0), problem.status == "infeasible"
    found = np.zeros(count)
    found[others] = rest.value
    if chosen is not None:
        found[program.integral] = chosen.value
    if whole and not is_solution(program, found):  # what HiGHS holds when its time is up may be none
        return None, 0.0, False
    return found, float(problem.value) * program.unit_s, problem.status == "optimal" and not gap


def is_solution(program: StageProgram, found: Floats) -> bool:
    """Whether a point keeps the rows of a program, and its whole variables are whole, up to `TOLERANCE`."""
    whole = found[program.integral]
    slack = TOLERANCE * np.maximum(1.0, np.abs(program.limits))
    return bool(
        np.all(np.abs(whole - np.round(whole)) <= TOLERANCE)
        and np.all(found >= -TOLERANCE)
        and np.all(found <= program.upper + TOLERANCE)
        and np.all(program.rows @ found <= program.limits + slack)
    )


def _options(solver: str, whole: bool, deadline: Deadline, gap: float) -> dict[str, Any]:
    """Time limit and gap in the terms of a solver."""
    left = None if deadline.seconds is None else max(0.01, deadline.remaining_s)
    if solver == "HIGHS":
        exact: dict[str, Any] = {"mip_rel_gap": gap, "mip_abs_gap": 1e-6} if whole else {}
        return exact if left is None else {**exact, "time_limit": left}
    if solver == "SCIPY" and left is not None:
        return {"scipy_options": {"time_limit": left}}
    return {}


def solve_whole(
    problem: Problem, deadline: Deadline, solver: str, *, computations: int | None = None, gap: float = 0.0
) -> Solution:
    """Solve a problem's program in whole numbers and let the referee judge the result."""
    work = staged_step(problem.graph)
    budget = problem.budget_nbytes
    stats: dict[str, int | float | str | bool] = {}
    if budget < budget_floor(problem.graph).nbytes:  # branching can take minutes to prove it
        return judge(problem, None, stats={"proven": True})
    # Solvers keep rows to about 1e-6 of the budget; if a plan exceeds it by that, retry with a margin.
    for limit in (budget, budget - budget // 100_000 - 1):
        try:
            program = stage_program(work, limit, deadline, computations=computations)
            found, cost_s, proven = minimize_with_cvxpy(
                program, whole=True, solver=solver, deadline=deadline, gap=gap
            )
        except DeadlineReached:
            found, cost_s, proven, program = None, 0.0, False, None
        if program is not None:
            stats["variables"] = len(program.cost)
        stats["proven"] = proven and limit == budget
        if found is None or program is None:
            break
        kept = [pair for pair, column in program.kept.items() if found[column] > 0.5]
        solution = judge(problem, order_of(work, kept), stats={**stats, "program_overhead_s": cost_s})
        if solution.feasible:
            return solution
    if deadline.seconds is not None and not stats.get("proven"):
        deadline.reached()
    return judge(problem, None, stats=stats)
