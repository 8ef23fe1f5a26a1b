"""A model that is called at many lengths: bits, budget and plans at each of them."""

from __future__ import annotations

import copy
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, MemoryMeter, PlannedModule
from remat_executor.module.pipeline import PipelineStages
from remat_facade import Hiremate
from remat_facade.planning.known_plans import carried
from remat_graph import Budget, Graph, Plan, Schedule, noremat_peak_nbytes
from remat_solvers import Problem, get_solver
from tests.helpers.acceptance import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:called in ")


class Blocks(nn.Module):
    """Attention and a perceptron, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(32, 96) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for mix, head in zip(self.mixes, self.heads, strict=True):
            q, k, v = mix(x).chunk(3, -1)
            x = x + head(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
            x = nn.functional.dropout(nn.functional.gelu(x), 0.1)
        return x.square().mean()


def sample(length: int) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))


def step(module: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Loss and gradients, and the metered peak."""
    torch.manual_seed(3)
    module.zero_grad()
    with MemoryMeter(module, x) as meter:
        loss = module(x)
        loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)], meter.peak_nbytes


def test_bits_and_budget_at_each_length(tmp_path: Path) -> None:
    """Lengths in no order: some plans are carried over; bits and budget hold at each."""
    torch.manual_seed(0)
    original = Blocks()
    planned = Hiremate(copy.deepcopy(original), sample(96), "60%", cache_dir=tmp_path, time_limit_s=5)
    were_carried = set()
    for length in (96, 70, 120, 33, 100, 70):
        mine, peak_nbytes = step(planned, sample(length))
        others, _ = step(original, sample(length))
        assert all(map(same_bits, mine, others)), length
        assert peak_nbytes <= planned.plan.budget_nbytes
        were_carried.add(carried(planned.plan))
    assert {False, True} == were_carried


@attrs.define(eq=False)
class Revising:
    """Plans with recomputation at first, and without once it is asked a second time."""

    asked: int = 0
    made: list[Plan] = attrs.field(factory=list)

    def __call__(self, graph: Graph) -> Plan:
        budget_nbytes = Budget.parse("60%").resolve(graph)
        found = get_solver("greedy").solve(Problem(graph, budget_nbytes))
        assert found.schedule is not None
        return self.plan(graph, found.schedule)

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """At the second step."""
        self.asked += 1
        return self.plan(graph, Schedule.unplanned(graph)) if self.asked == 2 else None

    def plan(self, graph: Graph, schedule: Schedule) -> Plan:
        self.made.append(
            Plan.from_schedule(
                graph,
                schedule,
                budget_nbytes=noremat_peak_nbytes(graph),
                lower_bound_s=0.0,
                solver="test",
            )
        )
        return self.made[-1]


def test_a_plan_is_replaced_by_a_faster_one(tmp_path: Path) -> None:
    """Asked before each step; the step after goes on with the new plan, with the same numbers."""
    torch.manual_seed(0)
    original = Blocks()
    planner = Revising()
    planned = PlannedModule(
        copy.deepcopy(original), (sample(64),), {}, planner=planner, cache_dir=tmp_path, ways=()
    )
    others, _ = step(original, sample(64))
    ran = []
    for _ in range(3):
        mine, _ = step(planned, sample(64))
        assert all(map(same_bits, mine, others))
        ran.append(planned.plan)
    assert planner.asked == 3
    before, after = planner.made
    assert len(before.schedule.order) > len(after.schedule.order)
    assert ran == [before, after, after]


def test_a_faster_plan_that_cannot_run_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runtime may need more than the budget: the step goes on as it was."""
    planner = Revising()
    planned = PlannedModule(Blocks(), (sample(64),), {}, planner=planner, cache_dir=tmp_path, ways=())
    before = planned.plan

    def refuse(*_: object) -> None:
        raise BadInput(problem="a peak above the budget", advice="none")

    monkeypatch.setattr(PipelineStages, "lower", refuse)
    for _ in range(3):
        step(planned, sample(64))
        assert planned.plan == before
    assert planner.asked == 3
    assert len(planner.made) == 2
