"""Bits instead of tensors that a backward only compares, and of the masks of dropout."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule, estimated_graph, step_graph
from remat_executor.ways.masks import (
    COMPARES,
    DROPOUTS,
    masked_gradient,
    masked_gradient_over,
    masks,
    pack_comparison,
    pack_mask,
)
from remat_graph import Roofline, specialize
from tests.helpers.bits import same_bits, with_special
from tests.helpers.planners import all_switched, save_all
from tests.ways.fuzz import steps

SMALL = partial(masks, least_nbytes=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("threshold_backward", (0,)),
    ("threshold_backward", (0.1,)),
    ("leaky_relu_backward", (0.01, True)),
    ("leaky_relu_backward", (0.0, False)),
    ("leaky_relu_backward", (-0.5, False)),
    ("hardsigmoid_backward", ()),
    ("hardtanh_backward", (0.0, 6.0)),
    ("hardtanh_backward", (-0.1, 0.1)),
    ("hardshrink_backward", (0.5,)),
    ("softshrink_backward", (0.1,)),
]


@pytest.mark.parametrize(("name", "scalars"), CALLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_give_the_bits_of_the_call(
    dtype: torch.dtype, name: str, scalars: tuple[Any, ...]
) -> None:
    """With NaN, infinities and zeros on both sides; one chunk or several; any number of elements."""
    torch.manual_seed(0)
    for count, size in itertools.product((1, 7, 8, 33, 1000, 70003), (128, 1 << 16)):
        x, gradient = (with_special(torch.randn(count) * 3, 0.4).to(dtype) for _ in range(2))
        wanted = COMPARES[name].call(gradient, x, *scalars)
        (bits,) = pack_comparison(x, name, *scalars, size)
        assert -(-count // 8) == bits.nbytes
        assert same_bits(wanted, masked_gradient(gradient, bits, name, *scalars, size))
        written = masked_gradient_over(gradient, bits, name, *scalars, size)
        assert written is gradient
        assert same_bits(wanted, written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(DROPOUTS))
def test_masks_of_dropout(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count, number in itertools.product((1, 8, 1001), (0.15, 2.0)):
        mask, gradient = torch.rand(count) < 0.6, with_special(torch.randn(count), 0.3).to(dtype)
        wanted = DROPOUTS[name](gradient, mask, number)
        (bits,) = pack_mask(mask, 128)
        assert -(-count // 8) == bits.nbytes
        assert same_bits(wanted, masked_gradient(gradient, bits, name, number, 128))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_bits_lie_as_the_elements_do_in_memory(layout: torch.memory_format) -> None:
    """Channels last, and the transposed matrix that dense tensors may be."""
    torch.manual_seed(0)
    for x in (torch.randn(2, 3, 5, 4).contiguous(memory_format=layout), torch.randn(5, 7).t()):
        gradient = torch.empty_like(x).normal_()
        wanted = torch.ops.aten.threshold_backward(gradient, x, 0)
        (bits,) = pack_comparison(x, "threshold_backward", 0, 128)
        assert same_bits(wanted, masked_gradient(gradient, bits, "threshold_backward", 0, 128))


class Net(nn.Module):
    """Functions whose results only their own backward reads, or another one too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(6, 40), nn.Sequential(*layers), nn.Linear(40, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.last(self.layers(self.first(x)).mul(1.5).cos()) - target).square().mean()


def inputs_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(7, 6).to(dtype), torch.randn(7, 5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layers", "switches"),
    [
        ([nn.ReLU()], 1),
        ([nn.ReLU(inplace=True), nn.Dropout(0.3)], 2),
        ([nn.Dropout(0.15), nn.LeakyReLU(), nn.Hardsigmoid()], 2),  # two backwards read one result
        ([nn.ReLU6()], 1),
        ([nn.Hardtanh(-0.2, 0.3), nn.Dropout(1.0)], 2),
        ([nn.Hardshrink(), nn.Softshrink()], 2),
        ([nn.Threshold(0.1, 20.0)], 1),
        ([nn.ReLU(), nn.Linear(40, 40)], 0),  # the linear layer's backward reads the result
        ([nn.LeakyReLU(1.0)], 0),  # everything passes
    ],
    ids=str,
)
def test_models_have_eagers_bits(dtype: torch.dtype, layers: list[nn.Module], switches: int) -> None:
    torch.manual_seed(0)
    model, inputs = Net(*copy.deepcopy(layers)).to(dtype), inputs_of(dtype)
    wanted = steps(copy.deepcopy(model), inputs)
    for planner in (all_switched(), all_switched(1)):
        module = PlannedModule(copy.deepcopy(model), inputs, {}, planner, ways=[SMALL])
        assert switches == len(module.graph.switches)
        found = steps(module, inputs)
        assert all(same_bits(one, other) for one, other in zip(wanted, found, strict=True))


def test_bits_are_kept_and_not_the_tensor() -> None:
    """One thirty-second of it is alive between forward and backward."""
    model, inputs = Net(nn.ReLU()), inputs_of()
    graph = step_graph(model, inputs, platform=Roofline(), ways=[SMALL])
    relu = next(op for op in graph.ops if op.target == "aten.relu.default").first.outputs[0]
    for on, read in (((), True), (graph.switches, False)):
        backward = [op for op in specialize(graph, on).graph.ops if op.backward]
        assert read == any(relu in op.first.inputs for op in backward)
    (bits,) = (value for value in graph.values if "_bits_for_" in value.name)
    assert graph.values[relu].nbytes == 32 * bits.nbytes


def test_small_tensors_have_no_way() -> None:
    assert not PlannedModule(Net(nn.ReLU()), inputs_of(), {}, save_all).graph.switches


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Hardtanh(), nn.Dropout(0.5)], ids=str)
def test_the_workspaces_are_what_the_way_says(layer: nn.Module, tmp_path: Path) -> None:
    """Estimated for graphs whose kernels are not measured; within 5 % of what the allocator sees."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(4, 512), layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x)).cos().sum()

    inputs = (torch.randn(1024, 4),)
    estimated = estimated_graph(Rows(), inputs, {}, Roofline(), ways=[SMALL])
    measured = step_graph(Rows(), inputs, platform=Roofline(), ways=[SMALL], cache_dir=tmp_path)
    pairs = [(one, other) for one, other in zip(estimated.ops, measured.ops, strict=True) if one.alternatives]
    assert len(pairs) == 2
    for one, other in pairs:
        (way,) = one.alternatives
        said, seen = (op.implementations[way.first].workspace_nbytes for op in (one, other))
        assert seen <= said <= 1.05 * seen
