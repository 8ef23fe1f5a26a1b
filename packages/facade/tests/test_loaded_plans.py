"""A plan that is given, on a graph that was measured again."""

from dataclasses import dataclass
from pathlib import Path

import attrs
import pytest

from remat_facade.planning.known_plans import SAVED
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.planner_wrappers import FixedPlanner
from remat_facade.planning.zoo import Zoo
from remat_graph import Grads, Graph
from remat_solvers.testing import unet

BUDGET = "70%"


@dataclass
class Case:
    """A step with a plan, and the same step with other times."""

    planner: RecomputePlanner
    graph: Graph
    again: Graph


@pytest.fixture(params=[Grads.NEW, Grads.PRESENT])
def case(request: pytest.FixtureRequest) -> Case:
    """For both states of `.grad`."""
    graph = unet(4)
    ops = [
        attrs.evolve(
            op,
            implementations=[
                attrs.evolve(each, time_s=each.time_s * (1 + i % 3)) for each in op.implementations
            ],
        )
        for i, op in enumerate(graph.ops)
    ]
    planner = RecomputePlanner(budget=BUDGET, method=Method(parameters={"moves": 2000}), grads=request.param)
    return Case(planner, graph, attrs.evolve(graph, ops=ops))


def test_its_bound_is_of_the_times_measured_now(case: Case) -> None:
    """The bound that was saved is of other times, and none would claim that any plan could cost nothing."""
    plan = FixedPlanner(case.planner(case.graph), case.planner, grads=case.planner.grads)(case.again)
    searched = case.planner(case.again)
    assert 0 < plan.lower_bound_overhead <= min(plan.overhead, searched.overhead)


def test_its_bound_is_kept_where_times_are_the_same(case: Case) -> None:
    """It may be a better one."""
    made = case.planner(case.graph)
    assert (
        FixedPlanner(made, case.planner, grads=case.planner.grads)(case.graph).lower_bound_s
        == made.lower_bound_s
    )


def test_a_plan_found_on_disk_has_such_a_bound_too(case: Case, tmp_path: Path) -> None:
    """Its budget and step are the same, its times are not."""
    planner = attrs.evolve(case.planner, zoo=Zoo(folder=tmp_path, times="test"))
    planner(case.graph)
    plan = planner(case.again)
    assert plan.solver_stats[SAVED]
    assert 0 < plan.lower_bound_overhead <= plan.overhead
