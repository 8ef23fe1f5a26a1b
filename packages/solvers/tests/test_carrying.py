"""A plan is carried over to other sizes of its step: it fits and is hardly worse than a search."""

import pytest

from remat_graph import Grads, Graph, Schedule, noremat_peak_nbytes, simulate, structure, verify
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches
from remat_graph.testing.resized import resized
from remat_solvers import (
    Carried,
    Deadline,
    Problem,
    Status,
    get_solver,
    min_budget,
    solve_present,
    solve_switches,
)
from remat_solvers.testing import chain, mobile, transformer, unet

NETWORKS = {
    "chain": chain(24, skips=4),
    "unet": unet(4),
    "mobile": mobile(4),
    "transformer": transformer(4),
}


def plan_of(graph: Graph, share: float) -> Schedule:
    """A plan at a share of the unplanned peak."""
    solution = solve_switches(get_solver("auto", moves=20_000), Problem(graph, budget_at(graph, share)))
    assert solution.schedule is not None
    return solution.schedule


def any_plan(graph: Graph) -> Schedule:
    """A cheap plan at four fifths of the unplanned peak, or the unplanned step."""
    found = solve_switches(get_solver("auto", moves=1000), Problem(graph, budget_at(graph, 0.8)))
    return found.schedule or Schedule.unplanned(graph)


def budget_at(graph: Graph, share: float) -> int:
    """In bytes."""
    return int(share * noremat_peak_nbytes(graph))


@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_hardly_slower_than_a_plan_that_was_searched_for(name: str, share: float) -> None:
    """By five points of the step, over seeds that all fit."""
    graph = NETWORKS[name]
    schedule = plan_of(graph, share)
    for seed in range(2):
        other = resized(graph, seed)
        assert structure(other) == structure(graph)
        problem = Problem(other, budget_at(other, share))
        found = solve_switches(Carried(schedule=schedule), problem)
        searched = solve_switches(get_solver("auto", moves=20_000), problem)
        assert found.overhead is not None
        assert searched.overhead is not None
        assert found.overhead <= searched.overhead + 0.05
        assert found.lower_bound_s <= searched.time_s


@pytest.mark.parametrize("switches", [2, 8])
def test_the_referee_accepts_it(switches: int) -> None:
    """Random graphs with few and with many switches: what is found fits and has the referee's seconds."""
    found = 0
    for seed in range(25):
        graph = with_random_switches(random_graph(seed), seed, most=switches)
        other = resized(graph, seed)
        verify(other)
        budget_nbytes = budget_at(other, 0.8)
        solution = solve_switches(Carried(schedule=any_plan(graph)), Problem(other, budget_nbytes))
        if solution.schedule is None:
            assert solution.status in (Status.NOT_FOUND, Status.INFEASIBLE)
            continue
        found += 1
        timeline = simulate(other, solution.schedule)
        assert timeline.peak_nbytes <= budget_nbytes
        assert solution.time_s == pytest.approx(timeline.time_s)
        assert solution.lower_bound_s <= solution.time_s
    assert found >= 10, "too few plans to show anything"


def test_steps_that_find_gradients_are_carried_too() -> None:
    """The plan delivers each gradient, and fits in that state."""
    graph = transformer(3)
    other = resized(graph, 1)
    budget_nbytes = budget_at(other, 0.7)
    before = solve_present(get_solver("auto", moves=20_000), Problem(graph, budget_at(graph, 0.7)))
    assert before.schedule is not None
    solution = solve_present(Carried(schedule=before.schedule), Problem(other, budget_nbytes))
    assert solution.schedule is not None
    assert simulate(other, solution.schedule, grads=Grads.PRESENT).peak_nbytes <= budget_nbytes


def test_nothing_is_found_where_nothing_fits() -> None:
    """Below the floor with proof, and without time to repair."""
    graph = chain(24)
    schedule = plan_of(graph, 0.8)
    assert Carried(schedule=schedule).solve(Problem(graph, 1)).status is Status.INFEASIBLE
    tight = Problem(resized(graph, 3), min_budget(resized(graph, 3)).nbytes)
    deadline = Deadline(0.0)
    found = Carried(schedule=schedule).solve(tight, deadline)
    assert deadline.hit
    assert found.status is Status.NOT_FOUND


def test_it_is_deterministic() -> None:
    """The same schedule twice."""
    graph, other = unet(4), resized(unet(4), 5)
    schedule = plan_of(graph, 0.6)
    problem = Problem(other, budget_at(other, 0.6))
    one, two = (Carried(schedule=schedule).solve(problem) for _ in range(2))
    assert one.schedule == two.schedule
    assert one.feasible
