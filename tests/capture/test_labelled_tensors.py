"""Weights of a class that only carries attributes, as bitsandbytes makes them in 4 bits, are planned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, RematWarning
from remat_executor.inspection.labelled_tensors import is_labelled, label_tensors
from tests.helpers.steps import assert_same_step, pair


class State:
    """What a kernel needs to read a weight, as `QuantState` holds it; scales are themselves scaled."""

    def __init__(self, scale: Tensor, power: int, inner: State | None = None) -> None:
        self.scale, self.power, self.inner = scale, power, inner

    def weight(self, packed: Tensor) -> Tensor:
        """In full precision."""
        scale = self.scale if self.inner is None else self.inner.weight(self.scale)
        return packed.to(torch.float32) * scale * 2.0**self.power


class Params4bit(nn.Parameter):
    """Stands for the class of that name."""

    quant_state: State
    module: nn.Module | None

    def __new__(cls, data: Tensor, state: State, module: nn.Module | None) -> Params4bit:
        """A weight in whole numbers."""
        made = torch.Tensor._make_subclass(cls, data, False)  # as bitsandbytes does
        made.quant_state = state
        made.module = module
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        """With a state of its own."""
        return Params4bit(self.data.clone(), copy.deepcopy(self.quant_state, memo), memo.get(id(self.module)))


Params4bit.__module__ = "bitsandbytes.nn.modules"


class Multiply(torch.autograd.Function):
    """Keeps the state, and reads its tensors again in the backward, when the forward is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: State) -> Tensor:
        """As its gradient does, from the packed weight."""
        ctx.packed, ctx.state = packed, state
        return x @ state.weight(packed).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Of the input."""
        return gradients[0] @ ctx.state.weight(ctx.packed), None, None


class Packed(nn.Module):
    """A linear layer whose weight is packed."""

    def __init__(self) -> None:
        super().__init__()
        inner = State(torch.rand(6, 1), 0)
        state = State(torch.randint(1, 9, (6, 1)), -3, inner)
        self.weight = Params4bit(torch.randint(-7, 7, (6, 6), dtype=torch.int8), state, self)

    def forward(self, x: Tensor) -> Tensor:
        """Read the label."""
        found: Tensor = Multiply.apply(x, self.weight, self.weight.quant_state)
        return found


def network() -> nn.Module:
    """Layers that train around layers that do not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Packed(), nn.GELU(), Packed(), nn.Linear(6, 2))


def states(model: nn.Module) -> list[State]:
    """Those of the packed layers."""
    return [m.weight.quant_state for m in model.modules() if isinstance(m, Packed)]


def test_the_class_is_known_by_its_name() -> None:
    """Nothing of bitsandbytes is imported, and other classes are not taken."""

    class Other(nn.Parameter):
        pass

    assert is_labelled(Packed().weight)
    assert not any(map(is_labelled, (nn.Parameter(torch.ones(1)), torch.ones(1), Other(torch.ones(1)))))


def test_tensors_of_a_label_are_found() -> None:
    """Those in nested states as well; the module of the weight is left out."""
    layer = Packed()
    found = {name: tensor for name, _, _, tensor in label_tensors(layer.weight, "weight")}
    state = layer.weight.quant_state
    assert list(found) == ["weight.quant_state.scale", "weight.quant_state.inner.scale"]
    assert found["weight.quant_state.scale"] is state.scale
    assert found["weight.quant_state.inner.scale"] is state.inner.scale


def test_steps_are_exact_and_the_labels_stay_as_they_were(cache: Path) -> None:
    """Their tensors are inputs of the step: written in place or replaced, no new plan is made."""
    x = torch.randn(5, 6)
    original, planned = pair(network(), cache, x)
    held = [(state, state.scale, state.inner, state.inner.scale) for state in states(planned.module)]
    assert_same_step(original, planned, x)
    for state, scale, inner, inner_scale in held:
        assert (state.scale, state.inner, state.inner.scale) == (scale, inner, inner_scale)
    with torch.no_grad():
        for model in (original, planned.module):
            for state in states(model):
                state.inner.scale.mul_(3)
                state.scale = state.scale + 1
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 2}


def test_elsewhere_they_are_a_subclass_like_any_other(cache: Path) -> None:
    """As an argument or buffer, whose labels no capture would carry over."""
    layer = Packed()
    with pytest.raises(BadInput, match="the sample holds a Params4bit, a tensor subclass"):
        pair(nn.Bilinear(6, 6, 1), cache, torch.randn(6, 6), layer.weight)
    model = network()
    model.register_buffer("held", layer.weight)
    with pytest.raises(BadInput, match="the model has a Params4bit, a tensor subclass"):
        pair(model, cache, torch.randn(5, 6))


def test_a_number_of_a_label_is_guarded(cache: Path) -> None:
    """It is a constant of the step, so another one is another plan."""
    x = torch.randn(5, 6)
    original, planned = pair(network(), cache, x)
    assert_same_step(original, planned, x)
    for model in (original, planned.module):
        states(model)[0].power = 2
    with pytest.warns(RematWarning, match="planning again"):
        assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 2, "replanned": 1}
