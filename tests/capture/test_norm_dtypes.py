"""Batch norms whose running statistics are in a lower precision repeat as those in float32 do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_facade import Hiremate
from remat_graph import Graph, Plan
from remat_solvers import InfeasibleBudget
from tests.helpers.planners import plan_order

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORM = "aten._native_batch_norm_legit_functional.default"


class Shared(nn.Module):
    """Two norms called twice; nobody reads the outputs of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.beside = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        self.beside(x)
        self.beside(x * 2)
        return self.norm(self.second(x)).tanh()


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers)


def _repeat_norms(graph: Graph) -> Plan:
    """Every batch norm once more, in the backward."""
    norms = [i for i, op in enumerate(graph.ops) if op.target == NORM]
    forward = [i for i, op in enumerate(graph.ops) if not op.backward]
    backward = [i for i, op in enumerate(graph.ops) if op.backward]
    return plan_order(graph, [*forward, *norms, *backward], "repeat_norms")


def _assert_same_steps(original: nn.Module, planned: nn.Module, x: Tensor) -> None:
    """Two steps, so that the second one reads what the first one wrote."""
    for _ in range(2):
        outputs = []
        for module in (original, planned):
            module.zero_grad()
            output = module(x)
            output.float().square().mean().backward()
            outputs.append(output)
        assert torch.equal(*outputs)
        for (name, expected), actual in zip(original.named_parameters(), planned.parameters(), strict=True):
            assert (expected.grad is None) == (actual.grad is None), name
            if expected.grad is not None:
                assert torch.equal(expected.grad, actual.grad), name
        for (name, buffer), after in zip(original.named_buffers(), planned.buffers(), strict=True):
            assert buffer.dtype == after.dtype, name
            assert torch.equal(buffer, after), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", [_convolutions, Shared])
def test_norms_repeat_and_write_their_statistics_once(
    model: type[nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bitwise as eager, with each norm computed twice."""
    torch.manual_seed(0)
    planned_model = model().to(dtype)
    original = copy.deepcopy(planned_model)
    x = torch.randn(4, 3, 10, 10, dtype=dtype) if model is _convolutions else torch.randn(5, 6, dtype=dtype)
    planned = PlannedModule(planned_model, (x,), {}, _repeat_norms, cache_dir=tmp_path)
    _assert_same_steps(original, planned, x)
    assert planned.runs == {"planned": 2}


def test_a_convolutional_net_of_bfloat16_near_its_smallest_budget(tmp_path: Path) -> None:
    """No norm is kept from repeating, and the plan repeats some. OneDNN's memory is the processor's."""
    torch.manual_seed(0)
    model = _convolutions().to(torch.bfloat16)
    original, x = copy.deepcopy(model), torch.randn(4, 3, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(InfeasibleBudget) as smaller:
        Hiremate(copy.deepcopy(model), x, 1, cache_dir=tmp_path, time_limit_s=5.0)
    planned = Hiremate(model, x, smaller.value.smallest_nbytes, cache_dir=tmp_path, time_limit_s=5.0)
    norms = [i for i, op in enumerate(planned.graph.ops) if op.target == NORM]
    assert [1] * 4 == [planned.graph.ops[i].rerun for i in norms]
    assert any(planned.plan.schedule.order.count(i) > 1 for i in norms)
    _assert_same_steps(original, planned, x)
