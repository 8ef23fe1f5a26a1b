"""Models with frozen layers in the middle: fine-tuned heads, perceptual losses, generators under a critic."""

from __future__ import annotations

import copy
import itertools
import random
import warnings

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from tests.helpers.bits import same_bits
from tests.helpers.planners import all_switched
from tests.ways.fuzz import FAMILIES, random_case, steps

COUNT = 6  # models with layers that are frozen and others that are not


def frozen_case(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]] | None:
    """A random model of which some layers are frozen, and a batch; None if no layer is, or all are.

    The batch requires a gradient, so that a frozen layer has one to make: a group norm that has none to make
    ends the process (torch 2.13; see `tests.ways.fuzz`).
    """
    model, (x, target) = random_case(seed)
    x.requires_grad_()
    rng = random.Random(f"frozen {seed}")
    for layer in model.modules():
        if rng.random() < 0.4:
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    if all(trained) or not any(trained):
        return None
    return model, (x, target)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_random_models_have_eagers_bits(family: str) -> None:
    """With all ways of a family."""
    cases = itertools.islice(filter(None, map(frozen_case, itertools.count())), COUNT)
    for model, inputs in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that draw nothing, or whose blocks have one element
            wanted = steps(copy.deepcopy(model), inputs)
            planned = PlannedModule(copy.deepcopy(model), inputs, {}, all_switched(), ways=[FAMILIES[family]])
            found = steps(planned, inputs)
        assert len(wanted) == len(found)
        assert all(same_bits(one, other) for one, other in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False)),
        (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8).eval()),
        (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 2)),
        (nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.GroupNorm(2, 8)),
    ],
)
def test_a_last_layer_that_is_frozen(layers: tuple[nn.Module, ...]) -> None:
    """Its backward makes the gradient of its input alone."""
    layers[-1].requires_grad_(False)
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 10, 10)
    planned = PlannedModule(copy.deepcopy(model), (x,), {}, all_switched(), ways=[FAMILIES["masks"]])
    for each in (model, planned):
        each(x).square().sum().backward()
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or same_bits(one.grad, other.grad)
