"""Activations repeated from a norm's input and statistics: errors as eager's, and only in repeats."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.ways import norm_activations as module_of
from remat_executor.ways.norm_activations import norm_activations, normalized_activation
from remat_graph import specialize
from tests.helpers.planners import all_switched, save_all
from tests.helpers.rounding_errors import MOST, errors, relative, repeated

aten = torch.ops.aten
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}


class Net(nn.Module):
    """Convolutions, norms and activations, with a residual block or without."""

    def __init__(self, function: Callable[[Tensor], Tensor], residual: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 12, 3, padding=1, bias=False) for c in (3, 12, 12))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(3))
        self.function, self.residual = function, residual

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            made = norm(conv(x))
            x = self.function(made + x if self.residual and i else made)
        return (x if x.dtype is torch.float64 else x.float()).square().mean()


def mixed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Norms in float32, as usual."""
    model.to(dtype)
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.float()
    return model


def reference(
    x: Tensor, norm: nn.BatchNorm2d, function: Callable[[Tensor], Tensor], *others: Tensor
) -> Tensor:
    """In float64."""
    exact = copy.deepcopy(norm).double()
    return function(sum((exact(x.double()), *(other.double() for other in others)), torch.zeros(())))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_as_exact_as_the_calls(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all layouts, with chunks of a channel, of images, and of everything; alone and in a sum."""
    torch.manual_seed(0)
    function, options = ACTIVATIONS[name], {"relu6": (0.0, 6.0), "leaky_relu": (0.01,)}.get(name, ())
    target = "hardtanh" if name == "relu6" else name
    for shape in ((6, 8, 9, 7), (5, 8), (4, 8, 33)):
        for layout in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 4 else 1]:
            x = torch.randn(shape).mul_(2).add_(1).to(dtype).contiguous(memory_format=layout)
            norm = nn.BatchNorm1d(8) if len(shape) < 4 else nn.BatchNorm2d(8)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)
            weight, bias = norm.weight.detach(), norm.bias.detach()
            made, mean, inverse = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
            for others in ((), (torch.randn(shape).to(dtype).contiguous(memory_format=layout),)):
                wanted = reference(x, norm, function, *others)
                eager = relative(function(sum(others, made)).double(), wanted)
                for nbytes in (1, 1000, 1 << 20):
                    monkeypatch.setattr(module_of, "CHUNK_NBYTES", nbytes)
                    found = normalized_activation(
                        x, weight, bias, mean, inverse, *others, f"aten.{target}.default", *options
                    )
                    assert found.stride() == x.stride()
                    assert relative(found.double(), wanted) <= MOST * eager


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_steps_are_those_of_eager(dtype: torch.dtype, name: str, residual: bool) -> None:
    """Loss and gradients against float64, with each activation repeated once."""
    torch.manual_seed(0)
    model = mixed(Net(ACTIVATIONS[name], residual), dtype)
    x = torch.randn(4, 3, 10, 10).to(dtype)
    found = errors(model, (x,), [norm_activations], planner=repeated)
    assert 3 == len(found.module.graph.switches)
    assert {"norm_activations"} == {family for _, family in found.module.plan.rounding}
    assert 3 == len(found.module.plan.rounding)
    found.check()


def test_without_repeats_nothing_rounds() -> None:
    """The first run is the call itself, and the plan says so."""
    torch.manual_seed(0)
    model, x = Net(F.relu), torch.randn(4, 3, 10, 10)
    module = PlannedModule(copy.deepcopy(model), (x,), {}, all_switched(), ways=[norm_activations])
    assert module.plan.rounding == ()
    module(x).backward()
    model(x).backward()
    for one, other in zip(model.parameters(), module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Others(nn.Module):
    """Norms that have no way: in 16 bits, in evaluation, and of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8).bfloat16(), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)])
        self.norms[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = F.relu(self.norms[0](x.bfloat16())).float()
        return F.relu(self.norms[2](F.relu(self.norms[1](x)))).square().mean()


def test_other_norms_are_left_alone() -> None:
    graph = PlannedModule(Others(), (torch.randn(4, 3, 6, 6),), {}, save_all, ways=[norm_activations]).graph
    assert graph.switches == ()


def test_a_repeat_reads_the_norm_s_input_and_not_its_result() -> None:
    """So both results may be dropped, and one op makes the activation again."""
    graph = PlannedModule(
        Net(F.relu), (torch.randn(4, 3, 6, 6),), {}, save_all, ways=[norm_activations]
    ).graph
    on = specialize(graph, graph.switches).graph
    for op in on.ops:
        if op.target == "aten.relu.default":
            first, again = op.implementations
            assert 1 == len(first.inputs)
            assert 5 == len(again.inputs)
            assert set(first.inputs).isdisjoint(again.inputs)
            assert first.outputs == again.outputs
