"""The model cases are what the other tests take them for: reproducible, finite, free of side effects."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.helpers.models import CASES, CI_CASES, LARGE_CASES, ModelCase, get_case

_CASES = [case if case.ci else pytest.param(case, marks=pytest.mark.full) for case in (*CASES, *LARGE_CASES)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small lose more to threads that wait for each other than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _step(case: ModelCase, steps: int = 1) -> list[Tensor]:
    """Losses of `steps` momentum steps, then the gradients of the last one and the buffers."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        for step in range(steps):
            args, kwargs = case.sample(step)
            optimizer.zero_grad()
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *model.buffers()]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_names_are_unique_and_the_quick_cut_is_six_diverse_cases() -> None:
    names = [case.name for case in (*CASES, *LARGE_CASES)]
    assert len(set(names)) == len(names)
    assert len(CI_CASES) == 6
    assert {case.family for case in CI_CASES} == {"transformers", "torchvision", "own"}
    assert get_case("gpt2").name == "gpt2"
    with pytest.raises(KeyError, match="no model case 'gpt3'"):
        get_case("gpt3")


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_case_is_reproducible_and_leaves_global_random_states_alone(case: ModelCase) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = case.build()
    samples = case.sample(0), case.sample(0), case.sample(1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())

    assert model.training
    same, again, other = (
        [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)] for sample in samples
    )
    assert _same(same, again)
    assert not _same(same, other)
    assert _same([*model.state_dict().values()], [*case.build().state_dict().values()])


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_three_steps_are_finite_and_repeat_bitwise(case: ModelCase) -> None:
    first = _step(case, 3)
    assert all(torch.isfinite(tensor).all() for tensor in first)
    assert _same(first, _step(case, 3))
