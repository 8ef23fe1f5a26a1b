"""A trace takes the branches of eager that depend on constants alone, and no others."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from remat_executor import CaptureError
from remat_facade import Hiremate
from tests.helpers.models import get_case


class Branching(nn.Module):
    """Computes one of two things, as `decide` says."""

    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        loss: Tensor = y.square().mean() if self.decide(x) else y.exp().mean()
        return loss


def _consecutive(x: Tensor) -> bool:
    positions = torch.arange(x.shape[0], device=x.device) + 3
    return bool((positions.unsqueeze(0).diff(dim=-1) == 1).all())


def _counted(x: Tensor) -> bool:
    return torch.ones(x.shape, dtype=torch.long).sum().item() != x.numel()


def _compared(x: Tensor) -> bool:
    lower, upper = torch.arange(6).split(3)
    return torch.equal(lower + 3, upper)


def _sorted(x: Tensor) -> bool:
    return int(torch.tensor([2, 1]).sort().values[0]) == 1


@pytest.mark.parametrize("decide", [_consecutive, _counted, _compared, _sorted])
def test_constants_decide_as_in_eager(decide: Callable[[Tensor], bool], tmp_path: Path) -> None:
    eager = Branching(decide)
    model = copy.deepcopy(eager)
    x = torch.randn(4, 8)
    planned = Hiremate(model, x, "100%", cache_dir=tmp_path, zoo=False)
    expected, found = eager(x), planned(x)
    expected.backward()
    found.backward()
    assert torch.equal(expected, found)
    assert torch.equal(eager.linear.weight.grad, model.linear.weight.grad)


def _drawn(x: Tensor) -> bool:
    return bool(torch.randint(2, (4,)).any())


def _written(x: Tensor) -> bool:
    mask = torch.zeros(4, dtype=torch.bool)
    view = mask[:2]
    mask[0] = True
    return bool(view.any())


def _unwritten_memory(x: Tensor) -> bool:
    return bool(torch.empty(4, dtype=torch.bool).any())


def _data(x: Tensor) -> bool:
    return bool((x > 0).any())


def _mixed(x: Tensor) -> bool:
    return bool((torch.arange(4) + (x[:, 0] > 0)).any())


@pytest.mark.parametrize("decide", [_drawn, _written, _unwritten_memory, _data, _mixed])
def test_what_is_not_constant_is_refused(decide: Callable[[Tensor], bool], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"Branching\.forward|branch|depends"):
        Hiremate(Branching(decide), torch.randn(4, 8), "100%", cache_dir=tmp_path, zoo=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_attention_gets_no_mask_that_eager_does_not_make(name: str, tmp_path: Path) -> None:
    """Attention with a mask is another kernel: slower, and with other last bits."""
    case = get_case(name)
    model = case.build()
    args, kwargs = case.sample(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as eager:
        model(*args, **kwargs)
    planned = Hiremate(model, args, "100%", sample_kwargs=kwargs, cache_dir=tmp_path, zoo=False)
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    attention = [op for op in planned.graph.ops if op.target == f"{fused.replace('::', '.')}.default"]
    assert len(attention) == sum(event.name == fused for event in eager.events())
    assert not any("mask" in op.key for op in attention)
