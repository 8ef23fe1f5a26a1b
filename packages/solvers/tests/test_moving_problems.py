"""A problem may let values move: what the referee then says of a schedule is what a solution says."""

import attrs
import pytest

from remat_graph import Compute, Free, Lane, Links, Schedule, Start, Transfer, noremat_peak_nbytes, simulate
from remat_graph.serialization.schedules import schedule_from_data, schedule_to_data
from remat_graph.testing.random_graphs import random_chain
from remat_solvers import Problem, Status, judge, judge_schedule
from remat_solvers.methods.rotor import Rotor
from remat_solvers.transfers.idle_intervals import idle_intervals
from remat_solvers.transfers.placement import schedule_transfers

GRAPH = random_chain(3, 6)
ORDER = range(len(GRAPH.ops))
LINKS = Links(to_host_nbytes_per_s=32, to_device_nbytes_per_s=64)
BUDGET = int(0.8 * noremat_peak_nbytes(GRAPH))
MOVED = schedule_transfers(GRAPH, ORDER, idle_intervals(GRAPH, ORDER), BUDGET, LINKS)
TIMELINE = simulate(GRAPH, MOVED, links=LINKS)
PROBLEM = Problem(GRAPH, BUDGET, LINKS)


def test_a_schedule_that_moves_is_judged_by_all_lanes() -> None:
    """Its time is that of the last lane, on the problem's links."""
    solution = judge_schedule(PROBLEM, MOVED, stats={"tried": 1})
    assert (TIMELINE.time_s, TIMELINE.peak_nbytes) == (solution.time_s, solution.peak_nbytes)
    assert TIMELINE.time_s > TIMELINE.lane_s[Lane.COMPUTE] == solution.base_s
    assert Status.FEASIBLE is solution.status
    assert {"tried": 1} == solution.stats


@pytest.mark.parametrize(
    "change",
    [
        {"links": None},
        {"budget_nbytes": TIMELINE.peak_nbytes - 1},
        {"host_budget_nbytes": TIMELINE.host_peak_nbytes - 1},
    ],
    ids=["nothing may move", "device", "host"],
)
def test_what_the_problem_does_not_allow_is_not_found(change: dict[str, object]) -> None:
    """No links, a smaller device, a smaller host."""
    solution = judge_schedule(attrs.evolve(PROBLEM, **change), MOVED)
    assert Status.NOT_FOUND is solution.status
    assert (None, None, None) == (solution.schedule, solution.time_s, solution.peak_nbytes)


def test_just_enough_is_enough() -> None:
    """Both budgets at the peaks."""
    exact = Problem(GRAPH, TIMELINE.peak_nbytes, LINKS, TIMELINE.host_peak_nbytes)
    assert judge_schedule(exact, MOVED).feasible


@pytest.mark.parametrize(
    "steps",
    [[Free(0)], [Compute(0)], [Compute(0), Start(Transfer(0, Lane.TO_HOST))]],
    ids=["free", "unfinished", "unawaited"],
)
def test_an_invalid_schedule_is_not_found(steps: list[object]) -> None:
    """It is a result, not an error."""
    assert Status.NOT_FOUND is judge_schedule(PROBLEM, Schedule(steps, 0)).status
    assert Status.NOT_FOUND is judge_schedule(PROBLEM, None).status


def test_an_order_and_its_schedule_are_worth_the_same() -> None:
    """With links or without."""
    problem = Problem(GRAPH, noremat_peak_nbytes(GRAPH))
    plain = Schedule.from_order(GRAPH, ORDER)
    for links in (None, LINKS):
        by_order = judge(attrs.evolve(problem, links=links), ORDER)
        by_schedule = judge_schedule(attrs.evolve(problem, links=links), plain)
        assert attrs.asdict(by_order, recurse=False) == attrs.asdict(by_schedule, recurse=False)


def test_a_solver_that_moves_nothing_ignores_links() -> None:
    """The same answer as without."""
    with_links, without = (Rotor().solve(Problem(GRAPH, BUDGET, links)) for links in (LINKS, None))
    assert with_links.order == without.order is not None
    assert with_links.time_s == without.time_s


@pytest.mark.parametrize("nbytes", [-1, "much"])
def test_a_host_budget_is_bytes(nbytes: object) -> None:
    """Or None."""
    with pytest.raises(ValueError, match=r"host_budget_nbytes|invalid literal"):
        Problem(GRAPH, BUDGET, LINKS, nbytes)


def test_moves_survive_json() -> None:
    """Every step of them."""
    assert MOVED == schedule_from_data(schedule_to_data(MOVED), graph=GRAPH)
