"""The budget holds with ``.grad`` kept from an earlier step too, whatever blocks the allocator hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from remat_executor import StepOverBudget
from remat_executor.memory.block_slack import worst_case_nbytes
from remat_executor.module.pipeline import PipelineStages
from remat_facade import Offmate
from remat_facade.planning.offmate_planner import OffmatePlanner
from remat_graph import Grads, Graph, Plan
from remat_graph.training import accumulating, with_placement
from remat_offload import CudaMachine
from tests.helpers.offmates import offmate

MIB = 1 << 20
WIDTH, BATCH, LAYERS = 512, 600, 8  # an activation has more than 1 MiB, so its block has slack
WIDE = 4096  # the last weight has 8 MiB, and so has its gradient, which is added to the kept one


class Layers(nn.Module):
    """Linear layers, the last one wide; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.last(x[:64]).square().mean()


def sample() -> Tensor:
    """A batch."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def built(budget: int | str, device: str = "cpu", **options: Any) -> Offmate:
    """One that steps outside of the backward, unless an option says otherwise."""
    torch.manual_seed(0)
    model = Layers()
    given = {"optimizer": SGD(model.parameters(), lr=0.1), "zoo": False, "host_budget": "256MiB"}
    return offmate(model, (sample().to(device),), budget, **(given | options))


IN_BACKWARD = {"optimizer_in_backward": True, "accumulation": 3}


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans on the CPU leave room for blocks, as on CUDA."""
    monkeypatch.setattr(PipelineStages, "_blocks_may_be_larger", True)


def states_nbytes(module: Offmate) -> tuple[int, int]:
    """Of the blocks with ``.grad`` None, and with it kept."""
    schedule = module.plan.schedule
    kept_nbytes = worst_case_nbytes(accumulating(module.graph), schedule, grads=Grads.ACCUMULATE)
    return worst_case_nbytes(module.graph, schedule), kept_nbytes


def without_kept(self: OffmatePlanner, graph: Graph, plan: Plan) -> int:
    """The bound of one state."""
    return worst_case_nbytes(with_placement(graph, plan.on_host), plan.schedule)


@pytest.mark.parametrize(("budget", "options"), [("50%", {}), ("100%", IN_BACKWARD)])
def test_blocks_are_within_the_budget_in_both_states(
    budget: str, options: dict[str, Any], as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where those without ``.grad`` are, and those of gradients that are added up are not."""
    with monkeypatch.context() as patch:
        patch.setattr(OffmatePlanner, "blocks_nbytes", without_kept)
        before = built(budget, **options)
    module = built(budget, **options)
    whole_nbytes = module._remat.planner.budget_for(module.graph)
    without, kept = states_nbytes(before)
    assert without <= whole_nbytes < kept
    assert max(states_nbytes(module)) <= whole_nbytes
    before.close()
    module.close()


def test_a_plan_that_holds_in_both_states_is_not_made_again(
    as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for judge in (OffmatePlanner.blocks_nbytes, without_kept):
        monkeypatch.setattr(OffmatePlanner, "blocks_nbytes", judge)
        module = built("70%")
        found.append((module.plan.budget_nbytes, module.plan.schedule))
        module.close()
    assert found[0] == found[1]


def test_steps_in_the_backward_keep_no_gradients(as_on_cuda: None) -> None:
    """So nothing is left for blocks of theirs."""
    module = built("70%", optimizer_in_backward=True)
    planner, plan = module._remat.planner, module.plan
    assert planner.blocks_nbytes(module.graph, plan) == without_kept(planner, module.graph, plan)
    module.close()


def test_the_error_is_about_the_budget_that_was_given(
    as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it includes besides the step; what the error advises is more than what was needed."""
    monkeypatch.setattr(OffmatePlanner, "blocks_nbytes", lambda *_: 1 << 40)
    with pytest.raises(StepOverBudget) as over:
        built(120 * MIB, reserve_nbytes=MIB)
    taken_nbytes = MIB + BATCH * WIDTH * 4
    assert over.value.budget_nbytes == 120 * MIB
    assert over.value.peak_nbytes == taken_nbytes + (1 << 40)
    assert over.value.advised_nbytes > over.value.peak_nbytes


@pytest.mark.cuda
@pytest.mark.parametrize("budget", ["50%", "70%"])
def test_blocks_of_the_allocator_are_within_the_budget(budget: str) -> None:
    """By the device's own statistics, in steps that find ``.grad`` and add to it."""
    before_nbytes = torch.cuda.memory_allocated()
    module = built(budget, "cuda", machine=CudaMachine("cuda"), host_budget="256MiB")
    training = module._remat_training
    asked_nbytes = module._remat.planner.budget_for(module.graph) + training.external_nbytes
    x = sample().to("cuda")
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        module(x).backward()
        training.optimizer.step()
        module.synchronize()
        training.optimizer.zero_grad(set_to_none=False)
        peaks.append(torch.cuda.max_memory_allocated() - before_nbytes)
    assert max(peaks) <= asked_nbytes
    module.close()
