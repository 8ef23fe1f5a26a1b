"""Models as people have them: planned, they do what eager does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from remat_executor import PlannedModule
from tests.helpers.models import import_transformers
from tests.helpers.own_operators import Opaque
from tests.helpers.planners import repeat_at_random
from tests.helpers.residual import Block, normal
from tests.helpers.steps import assert_planned_step, pair


class Checkpointed(nn.Module):
    """Checkpoints placed by hand, of both kinds."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Cube(torch.autograd.Function):
    """A function with a backward of its own, which is not the true derivative: to tell whether it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 7 * gradient * x


class Custom(nn.Module):
    """A model around a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(Cube.apply(self.block(x)))
        return found


class Scaled(nn.Module):
    """A parametrization: the weight is made from what is trained."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * 2


def parametrized() -> nn.Module:
    """Weight norm, orthogonal-like scaling and a parametrization of one's own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[2], "weight", Scaled())
    return model


class Mixed(nn.Module):
    """Tensors of four dtypes: ids, bfloat16 layers, a complex detour, float32 at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.low = nn.Linear(8, 8).bfloat16()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.low(self.table(ids).bfloat16()).float()
        spectrum = torch.fft.fft(x.to(torch.complex64), dim=-1) * self.turn
        found: Tensor = self.last(torch.fft.ifft(spectrum, dim=-1).real)
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "checkpoint": (lambda: Checkpointed(reentrant=False), lambda: normal(4, 8)),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), lambda: normal(4, 8)),
    "autograd.Function": (Custom, lambda: normal(4, 8)),
    "torch.library": (lambda: Opaque("smooth"), lambda: normal(4, 8)),
    "triton_op": (lambda: Opaque("ripple"), lambda: normal(4, 8)),
    "parametrized": (parametrized, lambda: normal(4, 8)),
    "bfloat16": (lambda: Block().bfloat16(), lambda: normal(4, 8).bfloat16()),
    "float16": (lambda: Block().half(), lambda: normal(4, 8).half()),
    "float64": (lambda: Block().double(), lambda: normal(4, 8).double()),
    "several dtypes": (Mixed, lambda: torch.arange(12).reshape(3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_is(name: str, tmp_path: Path) -> None:
    """Several steps of an optimizer built before planning, and the numbers of eager."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    original, planned = pair(model, tmp_path, batch())
    optimizers.append(torch.optim.SGD(original.parameters(), lr=0.1))
    for _ in range(2):
        assert_planned_step(original, planned, batch())
        for optimizer in optimizers:
            optimizer.step()
    assert planned.runs["replanned"] == 0


def test_gradient_checkpointing_of_transformers(tmp_path: Path) -> None:
    """A model with `gradient_checkpointing_enable()`; and `generate` after planning."""
    transformers = import_transformers()
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is about to rename it
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    original = copy.deepcopy(model)
    planned = PlannedModule(
        model,
        (),
        {"input_ids": ids, "labels": ids, "use_cache": False},
        repeat_at_random(8),
        cache_dir=tmp_path,
    )
    losses = []
    for module in (original, planned):
        torch.manual_seed(3)
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.allclose(losses[0], losses[1], rtol=1e-6)  # capture takes the mask's other branch
    assert planned.runs["original"] == 0
    original.eval()
    planned.eval()
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(original.generate(ids, **kwargs), planned.generate(ids, **kwargs))


class Viewing(nn.Module):
    """Returns a view of its input, a view of an output, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.block(x)
        return x[:, :4], y.reshape(-1), y


def test_views_as_outputs_and_gradients_of_inputs(tmp_path: Path) -> None:
    """Views of inputs and of outputs are views, differentiate, and inputs get their gradients."""
    torch.manual_seed(0)
    sample = normal(4, 8).requires_grad_()
    original, planned = pair(Viewing().train(), tmp_path, sample)
    results = []
    for module in (original, planned):
        x = normal(4, 8).requires_grad_()
        torch.manual_seed(3)
        part, flat, whole = module(x)
        assert part.data_ptr() == x.data_ptr()
        assert flat.data_ptr() == whole.data_ptr()
        (part.sum() + flat.square().sum() + whole.sum()).backward()
        results.append([*(p.grad for p in module.parameters()), x.grad])
    *expected, of_input = results[0]
    *found, found_of_input = results[1]
    assert all(map(torch.equal, expected, found))
    # Three addends; the view of the input lies outside of the plan, so its share comes last.
    assert torch.allclose(of_input, found_of_input, rtol=1e-6)


class Doubled(torch.Tensor):
    """A tensor subclass that nobody knows."""


def test_a_tensor_subclass_runs_the_original_and_says_so(tmp_path: Path) -> None:
    """What no plan can serve is not planned, and is told."""
    original, planned = pair(nn.Linear(8, 8), tmp_path, normal(4, 8))
    strange = normal(4, 8).as_subclass(Doubled)
    with pytest.warns(UserWarning, match="Doubled"):
        found = planned(strange)
    assert torch.equal(torch.Tensor(found), torch.Tensor(original(strange)))
    assert planned.runs["original"] == 1
