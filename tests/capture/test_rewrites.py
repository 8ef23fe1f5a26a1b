"""Rewrites of the captured graph: fewer ops, fewer bytes, and eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_graph import noremat_peak_nbytes
from tests.helpers.planners import save_all

SPECIAL = [0.0, -0.0, 6.0, -6.0, 1.0, -1.0, 1e-40, -1e-40, 7.0, -7.0, 0.5, float("inf"), -float("inf")]


class Function(nn.Module):
    """A function of a linear layer's result and another input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.function(self.linear(x), other)


def planned(function: Callable[[Tensor, Tensor], Any]) -> PlannedModule:
    """The planned module, once three calls have given eager's bits."""
    torch.manual_seed(0)
    model = Function(function)
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    original = copy.deepcopy(model)
    module = PlannedModule(model, (x, other), {}, save_all)
    for _ in range(3):
        found = []
        for each in (original, module):
            each.zero_grad()
            torch.manual_seed(1)
            outputs = each(x, other)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(o.sum() for o in outputs if o.requires_grad).backward()
            found.append((*outputs, *(p.grad for p in each.parameters())))
        for one, other_one in zip(*found, strict=True):
            assert torch.equal(one.nan_to_num(3.0), other_one.nan_to_num(3.0))
    return module


def targets(module: PlannedModule) -> list[str]:
    return [op.target.removeprefix("aten.").removesuffix(".default") for op in module.graph.ops]


def test_clones_that_change_nothing_are_dropped() -> None:
    module = planned(lambda h, _: (h * 2).clone().t().clone(memory_format=torch.preserve_format).sin().sum())
    assert "clone" not in targets(module)


def test_clones_of_clones_are_dropped() -> None:
    module = planned(
        lambda h, _: (h.tanh().clone().clone().view(-1).clone() * h.exp().clone().view(-1)).sum()
    )
    assert "clone" not in targets(module)


def test_views_of_a_dropped_clone_show_its_source() -> None:
    module = planned(lambda h, o: (h.tanh().clone().view(-1).split(6)[1].unsqueeze(0) * 3 + o[0, 0]).sum())
    assert "clone" not in targets(module)
    assert not {"view", "split", "unsqueeze"} & set(targets(module))


@pytest.mark.parametrize(
    "function",
    [
        lambda h, o: (h.tanh().clone(), h.sum()),  # an output
        lambda h, o: (o.clone() * h).sum(),  # of an input
        lambda h, o: (h.view(2, 6)[1].clone() * 2).sum(),  # of a part
        lambda h, o: (h.t().clone(memory_format=torch.contiguous_format) * 2).sum(),  # another layout
    ],
    ids=["output", "input", "part", "layout"],
)
def test_clones_that_matter_stay(function: Callable[[Tensor, Tensor], Any]) -> None:
    assert "clone" in targets(planned(function))


def test_writes_into_slices_write_in_place() -> None:
    """A buffer that is filled in parts, twice: one storage, as in eager."""

    def filled(h: Tensor, o: Tensor) -> Tensor:
        buffer = torch.zeros(3, 4000)
        for i in range(4):
            buffer[:, i] = h[:, i]
            buffer[:, 10 * i + 10 : 10 * i + 14] = h
        buffer[:, 100:] = 0.0
        buffer[1] = 2.0
        buffer[:, 10:14] = h.double()  # another dtype
        return (buffer[:, :50] * h.sum()).sum()

    module = planned(filled)
    large = [v for v in module.graph.values if v.nbytes >= 3 * 4000 * 4]
    assert len(large) > 8
    assert noremat_peak_nbytes(module.graph) < 3 * 3 * 4000 * 4
    copies = [op for op in module.graph.ops if op.target == "aten.copy.default" and not op.backward]
    assert len(copies) == 1  # from another dtype


def test_equal_calls_are_made_once_where_the_first_lives() -> None:
    def masks(h: Tensor, o: Tensor) -> Tensor:
        for _ in range(3):
            mask = torch.ones(4, 4).tril() * 2 - 1
            h = (h @ mask).tanh()
        return h.sum()

    found = targets(planned(masks))
    assert found.count("tril") == 1
    assert found.count("ones") == 1
    assert found.count("mm") > 3


def test_equal_calls_whose_first_result_has_died_stay() -> None:
    def twice(h: Tensor, o: Tensor) -> Tensor:
        first = (o.exp() + 1).sum()
        return (h * first).sum() + (o.exp() + 2).sum()

    assert targets(planned(twice)).count("exp") == 2


def test_draws_and_outputs_are_not_merged() -> None:
    def draws(h: Tensor, o: Tensor) -> Tensor:
        one, other = F.dropout(h, 0.5), F.dropout(h, 0.5)
        return (one - other).abs().sum()

    assert targets(planned(draws)).count("native_dropout") == 2
    module = planned(lambda h, o: (h.sin().sum(), h.sin().detach(), h.sin().detach()))
    assert targets(module).count("sin") == 3


@pytest.mark.parametrize("x", [SPECIAL, [float("nan"), *SPECIAL[1:]]], ids=["numbers", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        F.relu6,
        F.hardtanh,
        lambda x: F.hardtanh(x, -6.0, 0.5),
        F.leaky_relu,
        lambda x: F.leaky_relu(x, 0.0),
        lambda x: F.leaky_relu(x, -0.5),
        lambda x: F.leaky_relu(x, 1e-30),
    ],
)
def test_backwards_from_results_have_the_bits(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, x: list[float]
) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(x, dtype=dtype))

        def forward(self) -> Tensor:
            h = function(self.weight * 1)
            return h * h

    model = Steps()
    original = copy.deepcopy(model)
    module = PlannedModule(model, (), {}, save_all)
    for each in (original, module):
        each().backward(torch.ones(len(x), dtype=dtype))
    assert original.weight.grad is not None
    assert module.weight.grad is not None
    assert torch.equal(original.weight.grad.nan_to_num(9.0), module.weight.grad.nan_to_num(9.0))


def test_a_result_that_is_kept_anyway_is_kept_alone() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 64), nn.ReLU6(inplace=True)) for _ in range(8))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    module = PlannedModule(Network(), (torch.randn(512, 64),), {}, save_all)
    result_nbytes = 512 * 64 * 4
    assert noremat_peak_nbytes(module.graph) < 12 * result_nbytes  # 8 results, and not 8 inputs too
    assert "clone" not in targets(module)
