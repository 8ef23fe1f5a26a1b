"""Progress reports: one at the end of each part, and of a graph with switches those of the whole."""

from itertools import count, pairwise

import pytest

from remat_graph import Graph, noremat_peak_nbytes
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Deadline, Problem, Progress, Solution, get_solver, min_budget, solve_switches
from remat_solvers.testing import chain


def reported(graph: Graph, budget_nbytes: int) -> tuple[list[Progress], Solution]:
    """The reports of `auto`, and its solution; the clock only counts."""
    told: list[Progress] = []
    ticks = count()
    deadline = Deadline(None, told.append, clock=lambda: float(next(ticks)))
    solver = get_solver("auto", moves=2_000)
    return told, solve_switches(solver, Problem(graph, budget_nbytes), deadline)


def test_each_part_of_the_portfolio_is_reported() -> None:
    """In the order in which they run, whether they find a plan or not."""
    graph = chain(24, skips=4)
    told, solution = reported(graph, noremat_peak_nbytes(graph) // 2)
    names = list(dict.fromkeys(progress.solver for progress in told))
    assert ["floor", "greedy", "bound", "cut"] == names[:4]
    assert solution.stats["method"] in names
    assert told[0].time_s is None
    assert (told[-1].time_s, told[-1].lower_bound_s) == (solution.time_s, solution.lower_bound_s)


@pytest.mark.parametrize(("most", "seed"), [(2, 3), (2, 8), (6, 21), (6, 5)])
def test_reports_are_of_the_whole(most: int, seed: int) -> None:
    """Also while one decision is solved: its bound may be higher than that of the others."""
    graph = with_random_switches(chain(12, seed=seed, skips=4), seed, most=most)
    told, solution = reported(graph, min_budget(graph).nbytes)
    assert most >= len(graph.switches) > 0
    assert solution.time_s is not None
    assert told
    slack = 1e-9 * graph.time_s
    for before, after in pairwise(told):
        assert before.elapsed_s < after.elapsed_s
        assert before.lower_bound_s <= after.lower_bound_s + slack
        assert after.time_s is not None or before.time_s is None
        assert (after.time_s or 0.0) <= (before.time_s or float("inf")) + slack
    assert told[-1].lower_bound_s <= solution.lower_bound_s + slack
    assert (told[-1].time_s or float("inf")) >= solution.time_s - slack
