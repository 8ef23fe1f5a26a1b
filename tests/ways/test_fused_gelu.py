"""GELU written out, as one call: errors as eager's or smaller, and only where the function is GELU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.ways.fused_gelu import fused_gelu, gelu_gradient, gelu_gradient_over
from remat_graph import noremat_peak_nbytes, specialize
from tests.helpers.models import import_transformers
from tests.helpers.planners import save_all
from tests.helpers.rounding_errors import LanguageLoss, errors


def new(x: Tensor) -> Tensor:
    """As Hugging Face's `gelu_new` and the first GPT-2 have it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: Tensor) -> Tensor:
    """As `gelu_fast`: ten digits, and the cube by products."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def other_order(x: Tensor) -> Tensor:
    """Another order of the factors."""
    return x * (0.5 * (torch.tanh((x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)) + 1))


def wrong_constant(x: Tensor) -> Tensor:
    """Nearly a GELU."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0))))


class Net(nn.Module):
    """Two layers around an activation; the first may add a second tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor], added: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)
        self.function, self.added = function, added

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.added:
            hidden = hidden + hidden.sin()
        made: Tensor = self.second(self.function(hidden))
        return (made if made.dtype is torch.float64 else made.float()).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [new, fast, other_order])
def test_errors_are_at_most_those_of_eager(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Loss and gradients against float64, without and with repeats; also with a sum as input."""
    torch.manual_seed(0)
    for added in (False, True):
        model = Net(function, added).to(dtype)
        for seed in (None, 1, 2):
            # A loss is one number: over fewer inputs, its error in bfloat16 is luck (1.6 times eager's).
            found = errors(model, (torch.randn(40, 16).to(dtype),), [fused_gelu], seed, draws=160)
            assert 1 == len(found.module.graph.switches)
            found.check()


@pytest.mark.parametrize("function", [wrong_constant, torch.tanh, lambda x: x * torch.tanh(F.softplus(x))])
def test_other_functions_are_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    """Those with a tanh that is no GELU's."""
    x = torch.randn(40, 16)
    assert not PlannedModule(Net(function), (x,), {}, save_all, ways=[fused_gelu]).graph.switches


class ReadsInside(nn.Module):
    """Something else reads a tensor inside."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x @ weight
        inner = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
        return (0.5 * x * (1.0 + inner)).square().mean() + inner.mean()


def test_what_something_else_reads_stays() -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    module = PlannedModule(ReadsInside(), (torch.randn(40, 16), weight), {}, save_all, ways=[fused_gelu])
    assert not module.graph.switches


def test_one_pass_each_and_the_input_is_all_that_is_kept() -> None:
    """With the way on, no tensor of the inside exists."""
    graph = PlannedModule(Net(new), (torch.randn(400, 16),), {}, save_all, ways=[fused_gelu]).graph
    on, off = specialize(graph, graph.switches).graph, specialize(graph, ()).graph
    assert noremat_peak_nbytes(on) < noremat_peak_nbytes(off)
    size = 400 * 48 * 4
    made = [
        [v for op in each.ops for v in op.first.outputs if each.values[v].nbytes == size]
        for each in (off, on)
    ]
    assert 4 == len(made[1])  # the first layer, GELU, and the gradients of both
    assert len(made[0]) > 16


def test_written_over_the_gradient_it_is_the_same() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, gradient = (torch.randn(1000).to(dtype) for _ in range(2))
        wanted = gelu_gradient(gradient, x)
        found = gelu_gradient_over(given := gradient.clone(), x)
        assert found is given
        assert torch.equal(wanted, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model(dtype: torch.dtype) -> None:
    """Each block of a GPT-2 has a switch."""
    transformers = import_transformers()
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **options)

    model = LanguageLoss(transformers.GPT2LMHeadModel(config).train()).to(dtype)
    found = errors(model, (torch.randint(0, 64, (8, 24)),), [fused_gelu], 1)
    assert 2 == len(found.module.graph.switches)
    found.check()
