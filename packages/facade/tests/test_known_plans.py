"""Which known plan is carried over to a size, and when a size that was carried over is searched for."""

import os
from pathlib import Path

import attrs
import pytest

from remat_facade.planning import planner as planning
from remat_facade.planning.known_plans import MOST_KNOWN, SAVING_S, SEARCHED_S, KnownPlans, carried
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.zoo import Zoo
from remat_graph import Grads, Graph, Plan, Schedule, noremat_peak_nbytes
from remat_graph.testing.resized import resized
from remat_solvers.testing import transformer, unet

GRAPH = unet(4)
KIND = ("one step", Grads.NEW)
QUICK = Method(parameters={"moves": 2000})


def plan_of(needed_nbytes: int, budget_nbytes: int, method: str = "search", **stats: float) -> Plan:
    """A plan of a size that needs so many bytes without a budget."""
    schedule = Schedule.unplanned(GRAPH)
    peak_nbytes = noremat_peak_nbytes(GRAPH)
    plan = Plan.from_schedule(
        GRAPH, schedule, budget_nbytes=peak_nbytes, lower_bound_s=0.0, solver="auto", solver_stats={}
    )
    stats_of = {"method": method, **stats}
    return attrs.evolve(
        plan,
        noremat_peak_nbytes=needed_nbytes,
        budget_nbytes=budget_nbytes,
        peak_nbytes=0,
        solver_stats=stats_of,
    )


def test_the_nearest_size_is_carried() -> None:
    """By what the step needs and by how tight the budget is; the nearest searched one comes along."""
    known = KnownPlans()
    small, large = plan_of(100, 100), plan_of(1000, 800)
    middle = plan_of(900, 800, "carried")
    for plan in (small, large, middle):
        known.add(KIND, plan)
    assert known.nearest(KIND, 120, 100) == (small, small)
    assert known.nearest(KIND, 880, 800) == (middle, large)
    assert known.nearest(("another step", Grads.NEW), 120, 100) is None


def test_a_much_tighter_budget_has_no_plan() -> None:
    """A plan that recomputes nothing says nothing about what to recompute."""
    known = KnownPlans()
    known.add(KIND, plan_of(100, 100))
    assert known.nearest(KIND, 140, 100) is not None
    assert known.nearest(KIND, 160, 100) is None


def test_carried_plans_alone_are_not_carried_on() -> None:
    """Without a plan that was searched for, nothing says how good a plan can be."""
    known = KnownPlans()
    known.add(KIND, plan_of(100, 100, "carried"))
    assert known.nearest(KIND, 100, 100) is None


def test_carried_plans_do_not_replace_the_searched_one() -> None:
    """However many sizes there are; else one of them would be searched for again and again."""
    known = KnownPlans()
    searched = plan_of(100, 100)
    known.add(KIND, searched)
    for needed_nbytes in range(101, 101 + 2 * MOST_KNOWN):
        known.add(KIND, plan_of(needed_nbytes, 100, "carried"))
    assert MOST_KNOWN == len(known.plans[KIND])
    found = known.nearest(KIND, 110, 100)
    assert found is not None
    assert searched == found[1]


def test_a_search_pays_off_once_its_time_is_lost() -> None:
    """Steps of all sizes count; a size is searched for once; a plan that loses nothing never."""
    known = KnownPlans()
    one = plan_of(100, 100, "carried", **{SAVING_S: 1.0, SEARCHED_S: 3.0})
    other = attrs.evolve(one, fingerprint="another")
    good = attrs.evolve(one, fingerprint="good", solver_stats={"method": "carried", SAVING_S: 0.0})
    assert [known.pays_off(plan) for plan in (one, other, good, one, one)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert known.pays_off(plan_of(100, 100)) is False


def carried_plan(planner: RecomputePlanner, monkeypatch: pytest.MonkeyPatch) -> tuple[Graph, Plan]:
    """A size whose plan is carried over, and may save a second a step."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    planner(GRAPH)
    other = resized(GRAPH, 0)
    plan = planner(other)
    assert carried(plan)
    return other, attrs.evolve(plan, solver_stats={**plan.solver_stats, SAVING_S: 1.0, SEARCHED_S: 1.5})


def test_a_planner_revises_its_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a search within the same budget, whose plan is saved; here it is faster."""
    zoo = Zoo(folder=tmp_path, times="test")
    planner = RecomputePlanner(budget="60%", method=QUICK, zoo=zoo)
    other, plan = carried_plan(planner, monkeypatch)
    saved = len(set(tmp_path.iterdir()))
    slow = attrs.evolve(plan, time_s=10 * plan.time_s)
    assert planner.revised(other, slow) is None
    found = planner.revised(other, slow)
    assert found is not None
    assert not carried(found)
    assert found.peak_nbytes <= plan.budget_nbytes
    assert len(set(tmp_path.iterdir())) == saved + 1
    assert planner.revised(other, slow) is None


def test_a_revision_that_is_no_faster_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not tried again."""
    planner = RecomputePlanner(budget="60%", method=QUICK)
    other, plan = carried_plan(planner, monkeypatch)
    fast = attrs.evolve(plan, time_s=0.0)
    assert [planner.revised(other, fast) for _ in range(4)] == [None] * 4
    assert planner.known.searched_later == {(plan.fingerprint, plan.grads)}


def test_plans_found_on_disk_are_carried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process meets the same sizes and searches for none of them."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    told: list[str] = []
    planner = RecomputePlanner(budget="60%", method=QUICK, zoo=Zoo(folder=tmp_path, times="test"))
    planner(GRAPH)
    later = attrs.evolve(planner, known=KnownPlans(), granted_nbytes=0, on_progress=told.append)
    later(GRAPH)
    assert carried(later(resized(GRAPH, 1)))
    ends = [line for line in told if line.startswith("planned")]
    assert "found on disk" in ends[0]
    assert "carried over" in ends[1]


def test_saved_plans_of_other_sizes_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later process, and for another budget; only where the caller asks for revisions."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    planner = RecomputePlanner(budget="60%", method=QUICK, zoo=Zoo(folder=tmp_path, times="test"))
    planner(GRAPH)
    later = attrs.evolve(planner, known=KnownPlans(), granted_nbytes=0)
    assert not carried(later(resized(GRAPH, 1)))
    later = attrs.evolve(planner, known=KnownPlans(), granted_nbytes=0, carries_saved=True)
    assert carried(later(resized(GRAPH, 2)))
    later = attrs.evolve(later, known=KnownPlans(), granted_nbytes=0, budget="70%")
    assert carried(later(GRAPH))


def test_saved_plans_of_another_step_or_method_are_not_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are files that were changed by hand."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    zoo = Zoo(folder=tmp_path, times="test")
    planner = RecomputePlanner(budget="60%", method=QUICK, zoo=zoo, carries_saved=True)
    planner(GRAPH)
    other = resized(GRAPH, 1)
    assert [plan.fingerprint for plan in zoo.of_step(other, planner.saved_as(other))]
    assert not zoo.of_step(transformer(2), planner.saved_as(transformer(2)))
    seeded = attrs.evolve(planner, method=attrs.evolve(QUICK, parameters={"moves": 1}))
    assert not zoo.of_step(other, seeded.saved_as(other))
    present = planner.for_grads(Grads.PRESENT)
    assert not zoo.of_step(other, present.saved_as(other))
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("budget_nbytes", "budget"))
    assert not zoo.of_step(other, planner.saved_as(other))


def test_the_latest_saved_plans_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of a step that was planned for many sizes."""
    monkeypatch.setattr("remat_facade.planning.zoo.MOST_OF_STEP", 2)
    zoo = Zoo(folder=tmp_path, times="test")
    for i, budget in enumerate(("60%", "70%", "80%")):
        planner = RecomputePlanner(budget=budget, method=QUICK, zoo=zoo)
        planner(GRAPH)
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_mtime - 100 + i,) * 2)
    budgets = [plan.budget_nbytes for plan in zoo.of_step(GRAPH, planner.saved_as(GRAPH))]
    assert budgets == [RecomputePlanner(budget=budget).budget_for(GRAPH) for budget in ("80%", "70%")]
