"""A model that is called at many lengths: bits, budget, costs and plans at each of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor import MemoryMeter, PlannedModule
from remat_executor.costs import annotate, measure
from remat_facade import Hiremate
from remat_graph import Budget, Graph, Plan, Schedule, noremat_peak_nbytes, structure
from remat_solvers import Problem, get_solver
from tests.helpers.acceptance import same_bits
from tests.helpers.planners import save_all

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
    """Sizes are planned from one another, in an order without order."""
    torch.manual_seed(0)
    original = Blocks()
    planned = Hiremate(copy.deepcopy(original), sample(96), "60%", cache_dir=tmp_path, time_limit_s=5)
    for length in (96, 70, 120, 33, 100, 70):
        mine, peak_nbytes = step(planned, sample(length))
        others, _ = step(original, sample(length))
        assert all(map(same_bits, mine, others)), length
        assert peak_nbytes <= planned.plan.budget_nbytes


def test_workspaces_are_measured_at_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A near length has the bytes of a graph by itself, though its operators are not timed; a far one is."""
    timed: list[int] = []
    real = measure._time

    def counting(*args: Any) -> Any:
        timed.append(1)
        return real(*args)

    monkeypatch.setattr(measure, "_time", counting)
    graphs: list[Graph] = []

    def plan(graph: Graph) -> Plan:
        graphs.append(graph)
        return save_all(graph)

    module = PlannedModule(Blocks(), (sample(96),), {}, planner=plan, cache_dir=tmp_path / "one", ways=())
    first = len(timed)
    module(sample(80))
    near = len(timed) - first
    module(sample(16))
    far = len(timed) - first - near
    PlannedModule(Blocks(), (sample(80),), {}, planner=plan, cache_dir=tmp_path / "other", ways=())
    assert first > 10
    assert near == 0
    assert far > 10
    scaled, alone = graphs[1], graphs[3]
    assert structure(scaled) == structure(alone)
    assert bytes_of(scaled) == bytes_of(alone)
    assert scaled.time_s > 0


def bytes_of(graph: Graph) -> list[list[int]]:
    """The workspaces of each op, and the sizes of the values."""
    runs = [[one.workspace_nbytes for one in op.implementations] for op in graph.ops]
    return [*runs, [value.nbytes for value in graph.values]]


def test_the_same_call_has_the_same_costs(tmp_path: Path) -> None:
    """A length that is captured again for another reason is not planned again."""
    source = annotate.measured_costs(torch.device("cpu"), tmp_path, None)
    graphs: list[Graph] = []

    def costs(*args: Any, **kwargs: Any) -> Graph:
        graphs.append(source(*args, **kwargs))
        return graphs[-1]

    module = PlannedModule(Blocks(), (sample(96),), {}, planner=save_all, costs=costs, max_plans=1)
    for length in (80, 96, 80):
        module(sample(length))
    assert graphs[1].ops == graphs[3].ops
    assert graphs[0].ops == graphs[2].ops


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
