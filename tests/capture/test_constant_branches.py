"""A trace takes the branches of eager that depend on constants alone, and no others."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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


def _unchanged(x: Tensor) -> bool:
    return bool((torch.arange(4).to(x.device).contiguous().long() > 2).any())


def _inverted(x: Tensor) -> bool:
    return bool((~torch.zeros(4, dtype=torch.bool)).all())


def _changed_list(x: Tensor) -> bool:
    numbers = [0, 0]
    made = torch.tensor(numbers) + 1
    numbers[0] = 5
    return bool((made > 1).any())


def _between_writes(x: Tensor) -> bool:
    made = torch.arange(4) + 1
    y = x + 1
    y += x
    y[0] = 0
    return bool((made > 3).any())


def _long_chain(x: Tensor) -> bool:
    made = torch.arange(4)
    for _ in range(400):
        made = made.roll(1)
    return int(made[0]) == 1


@pytest.mark.parametrize(
    "decide",
    [
        *(_consecutive, _counted, _compared, _sorted, _unchanged),
        *(_inverted, _changed_list, _between_writes, _long_chain),
    ],
)
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


def _fill(tensor: Tensor) -> None:
    """Write as scripted functions do: no mode sees the call."""
    with torch._C.DisableTorchFunction():
        tensor.fill_(1)


def _written_unseen(x: Tensor) -> bool:
    flags = torch.zeros(4, dtype=torch.long)
    view = flags[:2]
    _fill(flags)
    return bool(view.any())


def _written_by_keyword(x: Tensor) -> bool:
    numbers = torch.arange(4) - 2
    functional.relu(numbers[:2], inplace=True)
    return bool((numbers < 0).any())


def _written_in_list(x: Tensor) -> bool:
    flags = torch.zeros(4, dtype=torch.long)
    view = flags[:2]
    torch._foreach_add_([flags], 1)
    return bool(view.any())


def _written_by_data(x: Tensor) -> bool:
    flags = torch.zeros(4, dtype=torch.long)
    _fill(flags.data)
    return bool(flags.any())


def _written_by_overload(x: Tensor) -> bool:
    flags = torch.zeros(4, dtype=torch.long)
    torch.ops.aten.fill_.Scalar(flags[:2], 1)
    return bool(flags.any())


def _unwritten_memory(x: Tensor) -> bool:
    return bool(torch.empty(4, dtype=torch.bool).any())


def _data(x: Tensor) -> bool:
    return bool((x > 0).any())


def _mixed(x: Tensor) -> bool:
    return bool((torch.arange(4) + (x[:, 0] > 0)).any())


@pytest.mark.parametrize(
    "decide",
    [
        *(_drawn, _unwritten_memory, _data, _mixed, _written, _written_unseen, _written_by_keyword),
        *(_written_in_list, _written_by_data, _written_by_overload),
    ],
)
def test_what_is_not_constant_is_refused(decide: Callable[[Tensor], bool], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"Branching\.forward|branch|depends"):
        Hiremate(Branching(decide), torch.randn(4, 8), "100%", cache_dir=tmp_path, zoo=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_attention_gets_no_mask_that_eager_does_not_make(name: str, tmp_path: Path) -> None:
    """Attention with a mask is another kernel: slower, and with other last bits."""
    case = get_case(name)
    model = case.build()
    args, kwargs = case.sample(0)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as eager:  # without it torch 2.11 warns
        model(*args, **kwargs)
    planned = Hiremate(model, args, "100%", sample_kwargs=kwargs, cache_dir=tmp_path, zoo=False)
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    attention = [op for op in planned.graph.ops if op.target == f"{fused.replace('::', '.')}.default"]
    assert len(attention) == sum(event.name == fused for event in eager.events())
    assert not any("mask" in op.key for op in attention)
