"""Solve every combination of a few switches, or as many whole families, that may still be the best.

Each is a graph without switches, and the cut bound on its time costs little compared with a solve. Candidates
are solved from the lowest bound up until no bound is below the best time, so most are never solved.
"""

from functools import partial
from math import isfinite

import attrs

from remat_graph import Graph, Specialized, relaxed, specialize
from remat_solvers.bounds.decisions import combinations_of, time_bound_s
from remat_solvers.protocol import Deadline, Problem, Progress, Solution, Solver, Status


def solve_each(solver: Solver, problem: Problem, deadline: Deadline) -> Solution:
    """Solve the candidates from the lowest bound up."""
    graph = problem.graph
    tried, all_of_them = combinations_of(graph)
    bound_s = partial(time_bound_s, budget_nbytes=problem.budget_nbytes, deadline=deadline)
    waiting = [specialize(graph, on) for on in tried]
    ranked = sorted((bound_s(made.graph), len(made.on), i) for i, made in enumerate(waiting))
    lower_s = ranked[0][0] if all_of_them else bound_s(relaxed(graph))
    deadline.report("bound", None, lower_s)
    bounds: list[float] = []
    solved: list[tuple[Solution, Specialized]] = []
    best_s = float("inf")
    for place, (least_s, _, i) in enumerate(ranked):
        made = waiting[i]
        if least_s >= best_s and solved:
            bounds.append(least_s)
            continue
        # The most promising candidate gets the largest part of the time that is left.
        last = place + 1 == len(ranked) or ranked[place + 1][0] == float("inf")
        part = deadline.within(None) if last else deadline.share(0.6)
        others_s = min([*bounds, *(other for other, *_ in ranked[place + 1 :])], default=float("inf"))
        lower_s = min(least_s, others_s) if all_of_them else lower_s
        part.on_progress = partial(
            report_part, deadline, best_s, lower_s, others_s if all_of_them else lower_s
        )
        solution = solver.solve(attrs.evolve(problem, graph=made.graph), part)
        solved.append((solution, made))
        bounds.append(max(least_s, solution.lower_bound_s))
        best_s = min(best_s, float("inf") if solution.time_s is None else solution.time_s)
    return _best(graph, solved, min(bounds) if all_of_them else lower_s, all_of_them)


def report_part(deadline: Deadline, best_s: float, lower_s: float, most_s: float, progress: Progress) -> None:
    """Report the progress of a solve of one decision as that of the whole.

    Args:
        deadline: of the whole.
        best_s: time of the best plan of the decisions before; infinite if there is none.
        lower_s: the bound of the whole before this solve.
        most_s: the most that the bound of this decision can raise it to.
        progress: of the solve.
    """
    best_s = min(best_s, float("inf") if progress.time_s is None else progress.time_s)
    bound_s = max(lower_s, min(progress.lower_bound_s, most_s))
    deadline.report(progress.solver, best_s if isfinite(best_s) else None, bound_s)


def _best(
    graph: Graph, solved: list[tuple[Solution, Specialized]], lower_s: float, all_of_them: bool
) -> Solution:
    """The fastest solution as one of the original graph."""
    found = [(solution, made) for solution, made in solved if solution.schedule is not None]
    if not found:
        solution = solved[0][0]
        impossible = all_of_them and all(each.status is Status.INFEASIBLE for each, _ in solved)
        peaks = [each.smallest_nbytes for each, _ in solved if each.smallest_nbytes is not None]
        return attrs.evolve(
            solution,
            status=Status.INFEASIBLE if impossible else Status.NOT_FOUND,
            lower_bound_s=lower_s,
            base_s=graph.time_s,
            smallest_nbytes=min(peaks, default=None),
        )
    solution, made = min(found, key=lambda pair: pair[0].time_s or 0.0)
    assert solution.schedule is not None
    assert solution.time_s is not None
    lower_s = min(lower_s, solution.time_s)
    proven = solution.status is Status.OPTIMAL and solution.time_s <= lower_s * (1 + 1e-12)
    return attrs.evolve(
        solution,
        schedule=made.restore(solution.schedule),
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        lower_bound_s=lower_s,
        base_s=graph.time_s,
        stats={**solution.stats, "switched": ", ".join(sorted(made.on))},
    )
