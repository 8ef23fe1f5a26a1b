"""The CI cut of the acceptance: six models, equal to the bit and within the budget, and a liar caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from remat_executor import MemoryMeter, PlannedModule, WrongPrediction, step_graph
from remat_executor.costs.annotate import with_costs
from remat_executor.costs.cache import CostCache
from remat_facade import Hiremate
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, OverBudget, Plan
from remat_solvers import InfeasibleBudget
from tests.helpers.acceptance import broken_rules, compare, whole_step
from tests.helpers.models import CI_CASES, ModelCase, get_case
from tests.helpers.planners import repeat_at_random, save_all

QUICK_S = 3.0
# T5 has three times the ops of the next largest.
CUT = [
    pytest.param(c, id=c.name, marks=[pytest.mark.full] * (c.name in ("t5", "mobilenet_v2")))
    for c in CI_CASES
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cost cache for the module: ops are measured once."""
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are small: on a busy machine two threads run slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def smallest_budget(case: ModelCase, cache: Path) -> int:
    """What the error of a budget of one byte names."""
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    with pytest.raises(InfeasibleBudget) as caught:
        Hiremate(model, args, 1, sample_kwargs=kwargs, cache_dir=cache)
    return caught.value.smallest_nbytes


@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("budget", ["smallest", "70%"])
def test_planned_training_is_exact_and_within_its_budget(
    case: ModelCase, budget: int | str, cache: Path
) -> None:
    """Outputs, gradients, buffers and generator bitwise; peaks as predicted and within the budget."""
    if budget == "smallest":
        budget = smallest_budget(case, cache)

    def build(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hiremate:
        return Hiremate(model, args, budget, sample_kwargs=kwargs, cache_dir=cache, time_limit_s=QUICK_S)

    found = compare(case, build)
    assert dict(broken_rules(found)) == {}
    assert found.repeats > 0


@pytest.mark.parametrize("case", CUT)
def test_a_loss_outside_the_module_changes_nothing(case: ModelCase, cache: Path) -> None:
    """With tangents that come from the caller's own loss, training is as exact."""

    def build(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hiremate:
        return Hiremate(model, args, "80%", sample_kwargs=kwargs, cache_dir=cache, time_limit_s=QUICK_S)

    found = compare(case, build, wrapped=False)
    assert found.differences == ()
    assert found.untouched
    assert found.planned == found.calls


@pytest.mark.parametrize("case", CUT)
def test_planning_stays_within_the_budget(case: ModelCase, tmp_path: Path) -> None:
    """Capture and measuring hold one op's tensors at a time."""
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    budget_nbytes = smallest_budget(case, tmp_path / "other")
    with MemoryMeter(model, args, kwargs) as meter:
        step_graph(model, args, kwargs, cache_dir=tmp_path)
    assert meter.peak_nbytes <= budget_nbytes


def lying_costs(graph: Graph) -> Graph:
    """The graph as a lying translation would tell it: every storage of the forward at half its size."""
    values = tuple(
        attrs.evolve(value, nbytes=value.nbytes // 2) if value.role == "activation" else value
        for value in graph.values
    )
    return attrs.evolve(graph, values=values)


def test_the_meter_catches_a_schedule_that_lies(cache: Path) -> None:
    """With sizes halved behind the planner's back, the run breaks its promises and the harness says so."""

    def costs(*args: Any, **options: Any) -> Graph:
        return lying_costs(with_costs(*args, cache=CostCache(folder=cache), **options))

    planner = RecomputePlanner(budget="60%", method=Method(time_limit_s=QUICK_S))

    def build(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedModule:
        return PlannedModule(model, args, kwargs, planner, costs=costs)

    broken = dict(broken_rules(compare(get_case("sequential"), build)))
    assert {"budget", "live", "allocator"} <= broken.keys()


def test_a_planner_that_lies_is_not_believed(cache: Path) -> None:
    """A plan whose promised peak is not its schedule's, and one above its own budget."""
    case = get_case("sequential")
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)

    def promise_less(graph: Graph) -> Plan:
        plan = save_all(graph)
        return attrs.evolve(plan, peak_nbytes=plan.peak_nbytes // 2)

    def spend_more(graph: Graph) -> Plan:
        plan = save_all(graph)
        return attrs.evolve(plan, peak_nbytes=1, budget_nbytes=plan.peak_nbytes - 1)

    with pytest.raises(WrongPrediction, match="predicts"):
        PlannedModule(model, args, kwargs, promise_less, cache_dir=cache)
    with pytest.raises(OverBudget):
        PlannedModule(model, args, kwargs, spend_more, cache_dir=cache)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_is_exact(seed: int, cache: Path) -> None:
    """Repeats at random places of the backward: as exact, and as predicted."""

    def build(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedModule:
        return PlannedModule(model, args, kwargs, repeat_at_random(60, seed), cache_dir=cache)

    broken = dict(broken_rules(compare(get_case("unet_dropout"), build)))
    assert broken.keys() <= {"eager"}  # random repeats may well hold more than eager does


def test_an_infeasible_budget_names_one_that_works(cache: Path) -> None:
    """The smallest budget named works; the floor and the op that binds are named; below the floor says so."""
    case = get_case("unet_dropout")
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    with pytest.raises(InfeasibleBudget) as caught:
        Hiremate(model, args, 1, sample_kwargs=kwargs, cache_dir=cache)
    error = caught.value
    assert 1 < error.floor_nbytes <= error.smallest_nbytes
    assert str(error.smallest_nbytes) in str(error)
    graph = step_graph(model, args, kwargs, cache_dir=cache)
    assert error.floor_op in {op.name for op in graph.ops}
    assert error.floor_op in str(error)
    module = Hiremate(model, args, error.smallest_nbytes, sample_kwargs=kwargs, cache_dir=cache)
    assert module.plan.peak_nbytes <= error.smallest_nbytes
