"""How many plans a module keeps, which one goes first, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat_executor import BadInput, PlannedModule, RematWarning
from remat_facade import Hiremate
from remat_graph import Graph, Plan
from tests.helpers.planners import save_all


class Counting:
    """A planner that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, graph: Graph) -> Plan:
        self.asked += 1
        return save_all(graph)


def planned(tmp_path: Path, planner: Any = save_all, **options: Any) -> PlannedModule:
    """A module planned for a batch of one."""
    return PlannedModule(nn.Linear(2, 2), (torch.randn(1, 2),), {}, planner, cache_dir=tmp_path, **options)


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """With room for two, the one called again stays and the other goes."""
    planner = Counting()
    module = planned(tmp_path, planner, max_plans=2)
    for size in (1, 2, 1, 3, 1):
        module(torch.randn(size, 2)).sum().backward()
    assert planner.asked == 3
    assert module.runs == {"planned": 5, "replanned": 2, "dropped": 1}
    module(torch.randn(2, 2))  # went when 3 came
    assert planner.asked == 4
    assert module.runs == {"planned": 6, "replanned": 3, "dropped": 2}


@pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")
def test_dropping_is_said_once(tmp_path: Path) -> None:
    """With the two ways out."""
    module = planned(tmp_path, max_plans=1)
    with pytest.warns(RematWarning, match=r"more than 1 ways.*buckets=.*max_plans="):
        module(torch.randn(2, 2))
    module(torch.randn(3, 2))  # a second warning would be an error
    assert module.runs["dropped"] == 2


def test_planning_again_says_what_changed_and_how_long_it_took(tmp_path: Path) -> None:
    """One line, at the first time alone."""
    module = planned(tmp_path)
    with pytest.warns(
        RematWarning,
        match=r"\(inputs \(argument 0 .x2 -> 2x2\) changed\): planning again took [\d.]+ m?s; buckets=",
    ):
        module(torch.randn(2, 2))
    module(torch.randn(3, 2))


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_all_32_are_kept_by_default(tmp_path: Path) -> None:
    """Each is planned once."""
    planner = Counting()
    module = planned(tmp_path, planner)
    for _ in range(2):
        for size in range(1, 9):
            module(torch.randn(size, 2))
    assert planner.asked == 8
    assert module.runs == {"planned": 16, "replanned": 7}


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "2", None])
def test_a_bound_that_means_nothing(most: Any, tmp_path: Path) -> None:
    """One line that says what was wanted."""
    with pytest.raises(BadInput, match=r"max_plans is .*: ?|whole number"):
        planned(tmp_path, max_plans=most)


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_a_smaller_batch_may_take_what_the_sample_was_granted(tmp_path: Path) -> None:
    """The last batch of an epoch: so many percent of its own step could not hold a layer."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
    module = Hiremate(
        nn.Sequential(*layers), torch.randn(256, 32), "40%", cache_dir=tmp_path, time_limit_s=1.0
    )
    granted = module.plan.budget_nbytes
    for rows in (2, 512, 1):
        module(torch.randn(rows, 32)).sum().backward()
        assert (module.plan.budget_nbytes > granted) == (rows > 256)
        assert module.plan.budget_nbytes >= granted
    assert module.runs == {"planned": 3, "replanned": 3}
