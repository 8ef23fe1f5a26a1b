"""A second search with other random numbers: when there is one, and what becomes of both results."""

from typing import ClassVar

import attrs
import pytest

from remat_graph import Graph, noremat_peak_nbytes
from remat_solvers import Deadline, Problem, Progress, Solution, Status, get_solver, min_budget, solve_twice
from remat_solvers.switching.second_search import MOST_OPS, SEEDS
from remat_solvers.testing import chain, random_graph


@attrs.define(kw_only=True)
class _Drawn:
    """A solver that finds nothing but the overhead and the bound that are given for its seed."""

    name: ClassVar[str] = "drawn"
    overheads: dict[int, float | None]
    bounds: dict[int, float] = attrs.field(factory=dict)
    seed: int = 0
    moves: int | None = None
    seeds: list[int] = attrs.field(factory=list)

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """The result for this seed."""
        assert deadline is not None
        self.seeds.append(self.seed)
        base_s, overhead = problem.graph.time_s, self.overheads[self.seed]
        lower_s = base_s * (1 + self.bounds.get(self.seed, 0.0))
        time_s = None if overhead is None else base_s * (1 + overhead)
        deadline.report("drawn", time_s, lower_s)
        status = Status.NOT_FOUND if overhead is None else Status.FEASIBLE
        return Solution(status=status, schedule=None, lower_bound_s=lower_s, base_s=base_s, time_s=time_s)


def _problem(graph: Graph | None = None) -> Problem:
    graph = graph or chain(6)
    return Problem(graph, noremat_peak_nbytes(graph) // 2)


@pytest.mark.parametrize(
    ("first", "second", "seeds", "taken"),
    [
        (0.02, 0.0, [0], 0.02),  # near its bound
        (0.5, 0.4, [0, SEEDS], 0.4),
        (0.4, 0.5, [0, SEEDS], 0.4),
        (0.5, None, [0, SEEDS], 0.5),
        (None, 0.1, [0], None),
    ],
)
def test_the_faster_plan_counts(
    first: float | None, second: float | None, seeds: list[int], taken: float | None
) -> None:
    """Another seed is tried where there is a plan, and it is far from its bound."""
    solver = _Drawn(overheads={0: first, SEEDS: second})
    solution = solve_twice(solver, _problem())
    assert solver.seeds == seeds
    assert solution.overhead == (None if taken is None else pytest.approx(taken))


def test_the_higher_bound_counts_whichever_plan_it_came_with() -> None:
    """And a plan that meets the bound of the other search is optimal."""
    problem = _problem()
    higher = solve_twice(_Drawn(overheads={0: 0.5, SEEDS: 0.4}, bounds={0: 0.3, SEEDS: 0.2}), problem)
    assert higher.lower_bound_overhead == pytest.approx(0.3)
    assert higher.status is Status.FEASIBLE
    met = solve_twice(_Drawn(overheads={0: 0.5, SEEDS: 0.6}, bounds={SEEDS: 0.5}), problem)
    assert met.overhead == pytest.approx(0.5)
    assert met.status is Status.OPTIMAL


def test_work_that_is_set_time_that_is_up_and_large_graphs_end_it_after_one_search() -> None:
    """What the caller limits is not doubled."""
    for solver, problem, deadline in (
        (_Drawn(overheads={0: 0.5}, moves=1000), _problem(), Deadline()),
        (_Drawn(overheads={0: 0.5}), _problem(chain(MOST_OPS // 2 + 1)), Deadline()),
        (_Drawn(overheads={0: 0.5}), _problem(), Deadline(0.0)),
    ):
        assert solve_twice(solver, problem, deadline).overhead == pytest.approx(0.5)
        assert solver.seeds == [0]


def test_progress_shows_the_best_of_both_searches() -> None:
    """A slower plan or a lower bound of the second search is not shown."""
    shown: list[Progress] = []
    problem = _problem()
    solver = _Drawn(overheads={0: 0.4, SEEDS: 0.5}, bounds={0: 0.3, SEEDS: 0.2})
    solve_twice(solver, problem, Deadline(on_progress=shown.append))
    assert [each.time_s for each in shown] == [pytest.approx(1.4 * problem.graph.time_s)] * 2
    assert [each.lower_bound_s for each in shown] == [pytest.approx(1.3 * problem.graph.time_s)] * 2


def test_a_wide_gap_is_searched_twice_and_the_same_again_gives_the_same() -> None:
    """With the solver that entry points run: the faster of its plans by both seeds."""
    graph = random_graph(33, ops=24)
    problem = Problem(graph, min_budget(graph).nbytes)
    first, second = (get_solver("auto", seed=seed).solve(problem).time_s for seed in (0, SEEDS))
    assert first is not None
    assert second is not None
    assert first != second
    found, again = (solve_twice(get_solver("auto"), problem) for _ in range(2))
    assert found.time_s == min(first, second)
    assert found.order == again.order
