"""The figures of a plan are simulated, and a plan above its budget is never made."""

import math
import pickle
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings

from remat_graph import FalseBound, Graph, InvalidSchedule, OverBudget, Plan, Schedule, save_plan, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.strategies import schedules

GRAPH = random_graph(4)
SCHEDULE = Schedule.from_order(GRAPH, random_order(GRAPH, 1))
PEAK = simulate(GRAPH, SCHEDULE).peak_nbytes


def make(
    schedule: Schedule = SCHEDULE,
    *,
    budget_nbytes: int = PEAK,
    lower_bound_s: float = 0.0,
    **options: bool | dict[Any, Any] | str,
) -> Plan:
    return Plan.from_schedule(
        GRAPH, schedule, budget_nbytes=budget_nbytes, lower_bound_s=lower_bound_s, solver="tester", **options
    )


@settings(deadline=None)
@given(schedules())
def test_every_figure_is_the_referees(case: tuple[Graph, Schedule]) -> None:
    """Peaks, seconds, and the ratios that follow from them."""
    graph, schedule = case
    timeline = simulate(graph, schedule)
    plan = Plan.from_schedule(
        graph, schedule, budget_nbytes=timeline.peak_nbytes, lower_bound_s=graph.time_s, solver="tester"
    )
    assert timeline.peak_nbytes == plan.peak_nbytes
    assert timeline.live_peak_nbytes == plan.live_peak_nbytes
    assert (timeline.time_s, timeline.recomputed_s) == (plan.time_s, plan.recomputed_s)
    assert plan.noremat_time_s == graph.time_s
    assert plan.gradient_nbytes <= min(plan.peak_nbytes, plan.noremat_peak_nbytes)
    assert 0.0 == plan.lower_bound_overhead <= plan.overhead == plan.gap
    assert 3 == len(plan.summary().splitlines())


def test_only_a_plan_is_saved(tmp_path: Path) -> None:
    """A module that has one, say, is named, and no file is made."""
    path = tmp_path / "plan.json"
    wrong: Any = {}
    with pytest.raises(TypeError, match=r"plan: is of type dict; expected a Plan"):
        save_plan(wrong, path)
    assert not path.exists()


def test_a_plan_above_the_budget_is_refused() -> None:
    """By one byte; the constructor refuses it too."""
    with pytest.raises(OverBudget, match=f"{PEAK:,} bytes, above the budget of {PEAK - 1:,}"):
        make(budget_nbytes=PEAK - 1)
    with pytest.raises(OverBudget):
        attrs.evolve(make(), budget_nbytes=PEAK - 1)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    """Before any figure is used."""
    with pytest.raises(InvalidSchedule):
        make(Schedule(SCHEDULE.steps[1:], SCHEDULE.boundary - 1))


def test_a_bound_above_the_schedule_is_refused() -> None:
    """Such a bound is wrong; rounding errors of a solver are tolerated."""
    time_s = simulate(GRAPH, SCHEDULE).time_s
    with pytest.raises(FalseBound, match="tester claims"):
        make(lower_bound_s=1.01 * time_s)
    assert time_s == make(lower_bound_s=time_s * (1 + 1e-9)).lower_bound_s


@pytest.mark.parametrize("bound", [math.nan, math.inf, -1.0])
def test_a_bound_is_a_number(bound: float) -> None:
    """NaN, infinity and negative numbers are refused."""
    with pytest.raises((ValueError, FalseBound)):
        make(lower_bound_s=bound)


def test_ratios_are_of_the_unplanned_time() -> None:
    """Overhead, its bound and the gap between them."""
    plan = attrs.evolve(make(), recomputed_s=3.0, noremat_time_s=20.0, lower_bound_s=21.0)
    assert 0.15 == plan.overhead
    assert 0.05 == pytest.approx(plan.lower_bound_overhead)
    assert plan.gap == pytest.approx(0.1)
    empty = attrs.evolve(plan, noremat_time_s=0.0)
    assert (0.0, 0.0, 0.0) == (empty.overhead, empty.lower_bound_overhead, empty.gap)


def test_the_summary_says_what_matters() -> None:
    """Peak, budget, overhead, bound, solver, and whether the deadline was hit."""
    text = make(platform="flops", deadline_hit=True).summary()
    for word in ("random-4-8", "peak", "budget", "repeated ops", "by tester on flops", "deadline"):
        assert word in text
    assert "deadline" not in make().summary()


def test_statistics_are_what_json_gives_back() -> None:
    """Numpy scalars become numbers; NaN becomes None."""
    stats = {
        "n": np.int64(3),
        "gap": np.float64("nan"),
        "sizes": (1, 2),
        "array": np.arange(2),
        5: {"x": math.inf},
    }
    expected = {"n": 3, "gap": None, "sizes": [1, 2], "array": [0, 1], "5": {"x": None}}
    assert expected == make(solver_stats=stats).solver_stats


def test_a_plan_names_its_maker() -> None:
    """The version of this package is always included."""
    assert {"remat_graph", "torch"} == set(make(versions={"torch": "2.13.0"}).versions)


def test_plans_and_errors_cross_processes() -> None:
    """Both can be sent from a worker process."""
    plan = make()
    assert plan == pickle.loads(pickle.dumps(plan))
    error = OverBudget(solver="s", peak_nbytes=2, budget_nbytes=1)
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error)) == (type(again), str(again))
