"""Eager plans on CUDA: the allocator hands out larger blocks than asked for, and the budget holds.

On the CPU a stand-in adds to the measured peak what the blocks would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import AllocatorRecord, PlannedModule, StepOverBudget, allocator_peak
from remat_executor.inspection.tensors import collect
from remat_executor.memory.block_slack import largest_slack_nbytes, worst_case_nbytes
from remat_executor.module import peak_check
from remat_executor.module.pipeline import PipelineStages
from remat_executor.module.planned_step import PlannedStep
from remat_executor.runtime.eager import Eager
from remat_executor.translation import translate
from remat_facade import Hiremate, Offmate
from remat_facade.planning import offmate_planner
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, Plan, Role, resolve_budget
from remat_solvers import InfeasibleBudget
from tests.helpers.offmates import LINKS
from tests.helpers.planners import save_all

WIDTH, BATCH = 64, 4_500  # an activation is above 1 MiB


class Layers(nn.Module):
    """Linear layers with dropout and a batch norm; returns its loss, or what the loss is computed of."""

    def __init__(self, *, width: int = WIDTH, loss: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm, self.loss = nn.BatchNorm1d(width), loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        x = self.norm(x)
        return x.square().mean() if self.loss else x


def sample(device: str = "cpu", batch: int = BATCH) -> Tensor:
    """A batch that gets a gradient too."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, WIDTH, generator=generator).to(device).requires_grad_()


@pytest.fixture
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of searches that end by themselves: a limit of time would decide what a busy machine finds."""
    return {"zoo": False, "cache_dir": tmp_path_factory.getbasetemp() / "costs"}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let plans on the CPU be treated as on CUDA, where each step counts 3 % more than its storages."""
    found: list[int] = []

    def counted(function: Callable[[], Any], device: Any) -> AllocatorRecord[Any]:
        record = allocator_peak(function, device)
        found.append(record.peak_nbytes + record.peak_nbytes // 32)
        return AllocatorRecord(peak_nbytes=found[-1], end_nbytes=record.end_nbytes, result=record.result)

    monkeypatch.setattr(PipelineStages, "_blocks_may_be_larger", True)
    monkeypatch.setattr(peak_check, "allocator_peak", counted)
    return found


def test_the_budget_holds_with_the_slack_of_blocks(peaks: list[int], options: dict[str, Any]) -> None:
    """The step is planned again until what the allocator counts is within the budget."""
    planned = Hiremate(Layers(), sample(), "100%", **options)
    budget_nbytes = resolve_budget("100%", planned.graph)
    assert peaks[0] > budget_nbytes >= peaks[-1] == planned.rehearsed_nbytes
    assert planned.plan.peak_nbytes < peaks[-1]


@pytest.mark.parametrize(("beyond_nbytes", "setting"), [(1 << 30, ""), (1 << 20, ""), (1 << 30, "True")])
def test_fragments_are_reported_once(
    beyond_nbytes: int,
    setting: str,
    peaks: list[int],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """With what expandable segments would save, where that is much and they are not set."""
    monkeypatch.setattr(peak_check, "fragments_nbytes", lambda device: beyond_nbytes)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{setting}" if setting else "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = Hiremate(Layers(), sample(), "100%", **options)
        planned(sample(batch=BATCH + 1))  # planned again
    found = [str(warning.message) for warning in caught if "expandable_segments" in str(warning.message)]
    assert len(found) == (beyond_nbytes == 1 << 30 and not setting)
    assert all("holds 1.00 GiB more than tensors take" in message for message in found)
    assert planned.fragments_nbytes == (None if setting else beyond_nbytes)


def test_segments_are_asked_whether_they_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting has no effect after the first use of a device."""
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert largest_slack_nbytes(expandable) == 0
    assert largest_slack_nbytes({}) == 1 << 20
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for segments, slack_nbytes in (([], 0), ([True], 0), ([True, False], 1 << 20)):
        found = [{"is_expandable": each} for each in segments]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda found=found: found)
        assert largest_slack_nbytes(expandable) == slack_nbytes


def test_a_plan_whose_bound_fits_is_not_measured(peaks: list[int], options: dict[str, Any]) -> None:
    """No step runs where the blocks could not exceed the budget, nor where all blocks are small."""
    ample = Hiremate(Layers(), sample(), "300%", **options)
    small = Hiremate(Layers(), sample(batch=100), "80%", **options)
    assert (ample.rehearsed_nbytes, small.rehearsed_nbytes, peaks) == (None, None, [])


def test_on_the_cpu_no_eager_plan_is_measured(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """There predictions are exact."""

    def never(*_: Any) -> int:
        raise AssertionError("measured")

    monkeypatch.setattr(peak_check, "measure_peak", never)
    assert Hiremate(Layers(), sample(), "80%", **options).rehearsed_nbytes is None


def test_measuring_changes_nothing(peaks: list[int], options: dict[str, Any]) -> None:
    """Buffers, gradients, hooks, versions and the generator are as before; results are eager's."""
    original, model, x = Layers(), Layers(), sample()
    original.load_state_dict(model.state_dict())
    fired: list[Tensor] = []
    for tensor in (*model.parameters(), x):
        tensor.register_hook(fired.append)
        tensor.grad = torch.ones_like(tensor)
    buffers = [b.clone() for b in model.buffers()]
    versions = [t._version for t in (x, *model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    planned = Hiremate(model, x, "80%", **options)
    assert peaks
    assert fired == []
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers()))
    assert versions == [t._version for t in (x, *model.parameters(), *model.buffers())]
    assert all(torch.equal(t.grad, torch.ones_like(t)) for t in (x, *model.parameters()))
    torch.manual_seed(5)
    found = planned(x)
    torch.manual_seed(5)
    assert torch.equal(original(x), found)


def test_an_error_says_how_the_allocator_wastes_nothing(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int], options: dict[str, Any]
) -> None:
    """If no plan leaves enough headroom."""
    monkeypatch.setattr(peak_check, "measure_peak", lambda step, tensors: 1 << 40)
    with pytest.raises(StepOverBudget, match=r"needs 1.00 TiB of a budget of .*expandable_segments:True"):
        Hiremate(Layers(), sample(), "80%", **options)


@pytest.mark.parametrize(("budget_nbytes", "plans"), [(1 << 30, 4), (1001, 1), (1, 0)])
def test_every_plan_with_a_margin_is_judged(
    budget_nbytes: int, plans: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """No plan is made in vain after the last one that is judged, nor one that may need nothing twice."""
    planned = PlannedModule(Layers(), (sample(),), {}, save_all, cache_dir=tmp_path)
    plan = attrs.evolve(planned.plan, peak_nbytes=budget_nbytes)
    margins: list[int] = []
    monkeypatch.setattr(peak_check, "worst_case_nbytes", lambda graph, schedule: budget_nbytes + 1000)

    class NeverWithin:
        """A planner whose plans never fit."""

        def budget_for(self, graph: Graph) -> int:
            return budget_nbytes

        def asked_for(self, nbytes: int) -> int:
            return nbytes

        def with_margin(self, nbytes: int) -> NeverWithin:
            margins.append(nbytes)
            return self

        def __call__(self, graph: Graph) -> Plan:
            return plan

    with pytest.raises(StepOverBudget):
        peak_check.replan_for_slack(planned.graph, plan, NeverWithin())
    assert len(margins) == plans  # and the first plan, which is given
    assert margins == sorted(set(margins))
    assert all(0 < margin < budget_nbytes for margin in margins)


@attrs.frozen(kw_only=True)
class TwoPlans:
    """A planner that has a plan for a graph that saves all, and one that needs less."""

    loose: Plan
    tight: Plan
    budget_nbytes: int

    def budget_for(self, graph: Graph) -> int:
        return self.budget_nbytes

    def asked_for(self, nbytes: int) -> int:
        return nbytes

    def with_margin(self, nbytes: int) -> TwoPlans:
        assert nbytes < self.budget_nbytes
        return attrs.evolve(self, budget_nbytes=self.budget_nbytes - nbytes)

    def __call__(self, graph: Graph) -> Plan:
        for plan in (self.loose, self.tight):
            if plan.peak_nbytes <= self.budget_nbytes:
                return plan
        names = {"budget_nbytes": 1, "floor_nbytes": 1, "floor_op": "", "floor_place": ""}
        raise InfeasibleBudget(**names, floor_op_nbytes=1, smallest_nbytes=self.tight.peak_nbytes)


def check_the_smallest_plan_is_tried(device: str, cache: Path) -> None:
    """Where a margin leaves no plan, the smallest one may leave enough for blocks."""
    model, x = Layers().to(device), sample(device)
    step = PlannedModule(model, (x,), {}, save_all, cache_dir=cache)._remat.latest
    tight = RecomputePlanner(budget="90%", method=Method(parameters={"moves": 1000}))(step.graph)

    def rebuild(plan: Plan) -> PlannedStep:
        return PlannedStep.build(step.captured, step.translation, step.graph, plan, Eager(), None, None)

    def replanned(budget_nbytes: int) -> Plan:
        planner = TwoPlans(loose=step.plan, tight=tight, budget_nbytes=budget_nbytes)
        found = peak_check.replan_until_it_fits(
            step, collect(model, (x,), {}), planner, rebuild, "eager", peak_check.block_headroom
        )
        return found.plan

    with pytest.raises(StepOverBudget) as over:
        replanned(step.plan.peak_nbytes)  # leaves nothing for the blocks of the smaller plan
    enough_nbytes = over.value.peak_nbytes  # of the smaller plan, not of the first one
    assert tight.peak_nbytes < step.plan.peak_nbytes < enough_nbytes < over.value.advised_nbytes
    assert replanned(enough_nbytes) is tight
    with pytest.raises(StepOverBudget) as over:
        replanned(enough_nbytes - 1)
    assert over.value.peak_nbytes == enough_nbytes


def test_the_smallest_plan_is_tried(peaks: list[int], tmp_path: Path) -> None:
    """And whether it fits is what decides."""
    check_the_smallest_plan_is_tried("cpu", tmp_path)


@pytest.mark.cuda
def test_the_smallest_plan_is_tried_on_cuda(tmp_path: Path) -> None:
    """The blocks of the test device are as large as CUDA's."""
    check_the_smallest_plan_is_tried("cuda", tmp_path)


def test_tangents_of_a_loss_outside_are_not_held(tmp_path: Any) -> None:
    """The measured peak is the predicted one: autograd alone holds the tangent, and the step frees it."""
    model, x = Layers(loss=False), sample()
    planned = PlannedModule(model, (x,), {}, save_all, cache_dir=tmp_path)
    step = planned._remat.latest
    assert peak_check.measure_peak(step, collect(model, (x,), {})) == planned.plan.peak_nbytes


def test_offloaded_steps_leave_the_slack_of_all_blocks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """They cannot run on trial, so the bound itself is within the budget."""
    bounds, budgets = [], []
    for wasteful in (False, True):
        monkeypatch.setattr(PipelineStages, "_blocks_may_be_larger", wasteful)
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        planned = Offmate(
            model,
            sample(batch=10 * BATCH),
            "90%",
            host_budget="256MiB",
            optimizer=optimizer,
            links=LINKS,
            time_limit_s=2.0,
            **options,
        )
        bounds.append(worst_case_nbytes(planned.graph, planned.plan.schedule))
        budgets.append(planned.plan.budget_nbytes)
        planned.close()
    assert bounds[1] <= budgets[0] < bounds[0]
    assert budgets[1] < budgets[0]  # a margin is left


@pytest.mark.parametrize("moves", [False, True])
def test_an_error_is_about_the_budget_that_was_given(
    moves: bool, monkeypatch: pytest.MonkeyPatch, peaks: list[int], options: dict[str, Any]
) -> None:
    """It includes a reserve, and of a module that moves values also buffers and inputs."""
    monkeypatch.setattr(peak_check, "measure_peak", lambda step, tensors: 1 << 40)
    for module in (peak_check, offmate_planner):
        monkeypatch.setattr(module, "worst_case_nbytes", lambda graph, schedule, *_, **__: 1 << 40)
    monkeypatch.setattr(peak_check, "slack_variation_nbytes", lambda *_: 0)
    model, x, reserve_nbytes = Layers(), sample(batch=10 * BATCH), 1 << 20
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {**options, "reserve_nbytes": reserve_nbytes, "time_limit_s": 2.0}
    if moves:
        given |= {"optimizer": optimizer, "host_budget": "256MiB", "links": LINKS}
    with pytest.raises(StepOverBudget) as over:
        (Offmate if moves else Hiremate)(model, x, "200MiB", **given)
    held = [*model.buffers(), x] if moves else []
    taken_nbytes = reserve_nbytes + sum(tensor.nbytes for tensor in held)
    assert over.value.budget_nbytes == 200 << 20
    assert over.value.peak_nbytes == taken_nbytes + (1 << 40)
    assert over.value.advised_nbytes > over.value.peak_nbytes


def test_a_loss_and_its_tangent_are_two_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each is rounded up by itself."""
    monkeypatch.setattr(translate._Translator, "rounding_nbytes", 512)
    planned = PlannedModule(Layers(), (sample(),), {}, save_all, cache_dir=tmp_path)
    (loss,) = (value for value in planned.graph.values if value.role is Role.OUTPUT)
    assert loss.nbytes == 1024


@pytest.mark.cuda
@pytest.mark.parametrize("budget", ["100%", "70%", "50%"])
def test_on_cuda(budget: str, options: dict[str, Any]) -> None:
    """In every step, the optimizer's states among the blocks, by the device's own statistics."""
    x = sample("cuda", batch=50 * BATCH)
    planned = Hiremate(Layers().cuda(), x, budget, time_limit_s=2.0, **options)
    optimizer = torch.optim.AdamW(planned.parameters())
    budget_nbytes = resolve_budget(budget, planned.graph)
    for _ in range(4):
        optimizer.zero_grad()
        x.grad = None
        assert allocator_peak(lambda: planned(x).backward(), "cuda").peak_nbytes <= budget_nbytes
        optimizer.step()
