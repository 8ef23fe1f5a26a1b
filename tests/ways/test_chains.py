"""Chains of elementwise calls by chunks: eager's bits, and nothing kept between the calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule, estimated_graph, step_graph
from remat_executor.ways.chains import chains, run_chain, run_chain_over
from remat_graph import Roofline, noremat_peak_nbytes, specialize
from tests.helpers.bits import same_bits, with_special
from tests.helpers.models import import_transformers
from tests.helpers.planners import all_switched, save_all
from tests.ways.fuzz import FORMULAS, Formula, steps

SMALL = partial(chains, least_chunks=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GELU_NEW = FORMULAS[0]
CALLS = (
    ("aten.mul.Tensor", (("#", 0), 0.5)),
    ("aten.pow.Tensor_Scalar", (("#", 0), 3.0)),
    ("aten.tanh.default", (("#", 3),)),
    ("aten.mul.Tensor", (("#", 1), ("#", 4))),
    ("aten.add.Tensor", (("#", 5), ("#", 2))),
)
"""Of two tensors, numbers 0 and 1."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1000,), (3, 23333), (2, 3, 5, 4)], ids=str)
def test_the_kernel_gives_the_bits_of_the_calls(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With special values, one chunk or several, two results, and written over a tensor."""
    torch.manual_seed(0)
    x, other = (with_special(torch.randn(shape), 0.2).to(dtype) for _ in range(2))
    if len(shape) == 4:
        x, other = (each.contiguous(memory_format=torch.channels_last) for each in (x, other))
    cubed = torch.ops.aten.pow.Tensor_Scalar(x, 3.0)
    product = other * torch.tanh(cubed)
    wanted = (cubed, product + x * 0.5)
    layout = (tuple(x.shape), x.stride())
    for size in (128, 1 << 16):
        found = run_chain(x, other, CALLS, ((3, *layout), (6, *layout)), 0, size)
        assert all(same_bits(one, same) for one, same in zip(wanted, found, strict=True))
        written = other.clone()
        (found_over,) = run_chain_over(x, written, CALLS, ((6, *layout),), 1, size)
        assert same_bits(wanted[1], found_over)
        assert found_over.data_ptr() == written.data_ptr()


class Net(nn.Module):
    """A formula between two linear layers."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.formula, self.last = nn.Linear(6, 20), Formula(formula), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.formula(self.first(x))).sum()


def assert_exact(model: nn.Module, inputs: tuple[Any, ...], switches: int) -> PlannedModule:
    """Plans with the ways on, without and with repeats, give eager's bits."""
    wanted = steps(copy.deepcopy(model), inputs)
    for planner in (all_switched(), all_switched(1)):
        module = PlannedModule(copy.deepcopy(model), inputs, {}, planner, ways=[SMALL])
        assert switches == len(module.graph.switches)
        found = steps(module, inputs)
        assert all(same_bits(one, other) for one, other in zip(wanted, found, strict=True))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_formulas_have_eagers_bits(number: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_exact(Net(FORMULAS[number]).to(dtype), (torch.randn(2, 5, 6).to(dtype),), 1)


@pytest.mark.parametrize(
    ("formula", "switches"),
    [
        (lambda x: x.tanh(), 0),  # one call
        (lambda x: (x * 2).sigmoid() * x, 0),  # sigmoid rounds by place
        (lambda x: (x.exp() * x.mean()).sin(), 0),  # no element of its own
        (lambda x: (x.exp() * x.sum(-1, keepdim=True)).sin(), 0),  # broadcast
        (lambda x: x.pow(1.7).sin() * x.cos(), 1),  # from the third call on
        (lambda x: GELU_NEW(x).view(-1, 10, 2).sin().cos().view(x.shape), 1),  # through views
        (lambda x: GELU_NEW(x) * GELU_NEW(x + 1), 1),
        (lambda x: F.softmax(GELU_NEW(x), -1) + GELU_NEW(x.cumsum(-1)), 2),
        (lambda x: GELU_NEW(x.t().contiguous()).t(), 1),  # transposed
    ],
    ids=[
        "one", "sigmoid", "mean", "broadcast", "power", "views", "product", "two", "transposed"
    ],
)  # fmt: skip
def test_where_there_are_chains(formula: Callable[[Tensor], Tensor], switches: int) -> None:
    torch.manual_seed(0)
    assert_exact(Net(formula), (torch.rand(5, 6),), switches)


class Returned(nn.Module):
    """A result within a chain is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.linear(x) * 2)
        return (inner.exp() * inner).sin().sum(), inner


def test_what_is_returned_is_made() -> None:
    torch.manual_seed(0)
    model, x = Returned(), torch.randn(4, 6)
    module = PlannedModule(copy.deepcopy(model), (x,), {}, all_switched(), ways=[SMALL])
    for _ in range(2):
        (one, inner), (other, wanted) = module(x), model(x)
        one.backward()
        other.backward()
        assert same_bits(inner, wanted)
    assert module.graph.switches
    for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert same_bits(mine.grad, theirs.grad)


class Loss(nn.Module):
    """The loss of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_language_models(name: str, dtype: torch.dtype) -> None:
    """One for each layer; a gated layer multiplies two of them."""
    transformers = import_transformers()
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            vocab_size=64,
            feed_forward_proj="gated-gelu",
        )
        config.decoder_start_token_id = 0
        model = transformers.T5ForConditionalGeneration(config)
    assert_exact(Loss(model).to(dtype).train(), (torch.randint(3, 64, (2, 24)),), 2)


def test_nothing_between_the_calls_is_kept() -> None:
    """Of five tensors that the backward reads one is left, and the chunks."""
    model, inputs = Net(GELU_NEW), (torch.randn(50000, 6),)
    graph = step_graph(model, inputs, platform=Roofline(), ways=[SMALL])
    nbytes = 50000 * 20 * 4
    assert 1 == len(graph.switches)
    on = specialize(graph, graph.switches).graph
    assert noremat_peak_nbytes(on) <= noremat_peak_nbytes(graph) - 3 * nbytes
    assert 17 == len(graph.ops) - len(on.ops)  # of 8 calls and 11 of the backward


def test_small_chains_have_no_way() -> None:
    assert not PlannedModule(Net(GELU_NEW), (torch.randn(5, 6),), {}, save_all).graph.switches


def test_the_workspaces_are_what_the_way_says(tmp_path: Path) -> None:
    """Estimated for graphs whose kernels are not measured; within 5 % of what the allocator sees."""
    model, inputs = Net(GELU_NEW), (torch.randn(20000, 6),)
    estimated = estimated_graph(model, inputs, {}, Roofline(), ways=[SMALL])
    measured = step_graph(model, inputs, platform=Roofline(), ways=[SMALL], cache_dir=tmp_path)
    pairs = [
        (one, other)
        for one, other in zip(estimated.ops, measured.ops, strict=True)
        if one.alternatives and one.implementations[one.alternatives[0].first].outputs
    ]
    assert len(pairs) == 2
    for one, other in pairs:
        (way,) = one.alternatives
        said, seen = (op.implementations[way.first].workspace_nbytes for op in (one, other))
        assert seen <= said <= 1.05 * seen
