"""A planner carries its plan over to other sizes of a step, where that is about as good as a search."""

from pathlib import Path

import attrs
import pytest

from remat_facade.planning import planner as planning
from remat_facade.planning.known_plans import KnownPlans, carried
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.zoo import Zoo
from remat_graph import Grads, noremat_peak_nbytes
from remat_graph.testing.resized import resized
from remat_solvers.testing import transformer, unet


def test_the_second_size_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its budget, and the report names the method; what was searched for is not carried."""
    monkeypatch.setattr(planning, "FAR", 1.0)  # these sizes differ more than those of one model
    planner = RecomputePlanner(budget="60%")
    graph = unet(4)
    assert not carried(planner(graph))
    for seed in range(3):
        other = resized(graph, seed)
        plan = planner(other)
        assert carried(plan)
        assert plan.peak_nbytes <= planner.budget_for(other)


def test_another_step_is_searched_for() -> None:
    """Another structure, another state of gradients, and another solver than the portfolio."""
    planner = RecomputePlanner(budget="60%")
    planner(unet(4))
    assert not carried(planner(transformer(2)))
    assert not carried(planner.for_grads(Grads.PRESENT)(resized(unet(4), 0)))
    named = RecomputePlanner(budget="70%", method=Method(solver="search"))
    named(unet(3))
    assert not carried(named(resized(unet(3), 0)))


def test_a_planner_with_a_margin_knows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor plans again with a margin; sizes that come later are carried from the same plan."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    planner = RecomputePlanner(budget="60%")
    planner(unet(4))
    assert carried(planner.with_margin(1)(resized(unet(4), 1)))


def test_a_worse_plan_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the carried plan is farther from its bound than it may be."""
    monkeypatch.setattr(planning, "FAR", -1.0)
    planner = RecomputePlanner(budget="60%")
    planner(unet(4))
    assert not carried(planner(resized(unet(4), 0)))


def test_carried_plans_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process searches for a plan of that size, if it meets it first."""
    monkeypatch.setattr(planning, "FAR", 1.0)
    zoo = Zoo(folder=tmp_path, times="test")
    planner = RecomputePlanner(budget="60%", zoo=zoo)
    planner(unet(4))
    saved = set(tmp_path.iterdir())
    other = resized(unet(4), 0)
    assert carried(planner(other))
    assert set(tmp_path.iterdir()) == saved
    assert not carried(attrs.evolve(planner, known=KnownPlans())(other))
    assert len(set(tmp_path.iterdir())) == len(saved) + 1


def test_a_budget_that_the_repair_misses_is_searched_for() -> None:
    """A much smaller budget: the search decides, and no plan exceeds it."""
    graph, other = unet(4), resized(unet(4), 2)
    planner = RecomputePlanner(budget=noremat_peak_nbytes(graph) - 1)
    planner(graph)
    tight = attrs.evolve(planner, budget="55%", granted_nbytes=0)
    plan = tight(other)
    assert plan.peak_nbytes <= tight.budget_for(other)
