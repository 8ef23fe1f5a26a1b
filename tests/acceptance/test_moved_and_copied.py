"""A planned module is moved, cast, saved, loaded and copied as its original is."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import RematWarning
from tests.helpers.residual import Block, normal
from tests.helpers.steps import assert_planned_step, pair


def test_moved_cast_and_loaded(tmp_path: Path) -> None:
    """`.to()`, `.half()`, `.double()`, `load_state_dict(assign=True)` after planning: planned anew, right."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(Block(), Block()).train(), tmp_path, normal(4, 8))
    state = {name: torch.randn_like(value) for name, value in planned.state_dict().items()}
    for module in (original, planned):
        module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    assert_planned_step(original, planned, normal(4, 8))
    assert planned.runs["replanned"] == 0
    for count, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16), start=1):
        for module in (original, planned):
            module.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)  # it says once that it plans again
            assert_planned_step(original, planned, normal(4, 8).to(dtype))
        assert planned.runs["replanned"] == count


def test_saved_and_copied(tmp_path: Path) -> None:
    """`torch.save` of the state goes back into an original; a deep copy trains on its own."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(Block(), Block()).train(), tmp_path, normal(4, 8))
    file = io.BytesIO()
    torch.save(planned.state_dict(), file)
    file.seek(0)
    original.load_state_dict(torch.load(file))
    copied = copy.deepcopy(planned)
    assert_planned_step(original, copied, normal(4, 8))
    assert all(p.grad is None for p in planned.parameters())
    assert_planned_step(original, planned, normal(4, 8))
    assert planned.get_submodule("0.up") is planned.module.get_submodule("0.up")


def test_a_copy_keeps_its_hooks_and_what_was_put_around_its_forward(tmp_path: Path) -> None:
    """As a copy of any module does; each calls its own."""
    torch.manual_seed(0)
    _, planned = pair(nn.Linear(8, 8), tmp_path, normal(4, 8))
    seen: list[Any] = []
    planned.register_forward_hook(lambda module, args, output: seen.append(module))
    inner = planned.forward.__func__

    def doubled(self: Any, x: Tensor) -> Tensor:
        output: Tensor = 2 * inner(self, x)
        return output

    expected = 2 * planned(normal(4, 8)).detach()
    planned.forward = MethodType(doubled, planned)
    copied = copy.deepcopy(planned)
    for module in (copied, planned):
        with pytest.warns(RematWarning, match="forward changed"):
            found = module(normal(4, 8)).detach()
        assert torch.equal(found, expected)
    assert seen == [planned, copied, planned]
    assert copied.runs == {"planned": 1, "replanned": 1}
    assert planned.runs == {"planned": 2, "replanned": 1}
    del planned.forward
    assert torch.equal(2 * planned(normal(4, 8)), expected)
    assert planned.runs == {"planned": 3, "replanned": 1}


def test_the_forward_shows_the_signature_of_the_originals(tmp_path: Path) -> None:
    """Trainers drop the inputs of a batch that it does not name."""
    original, planned = pair(Block().train(), tmp_path, normal(4, 8))
    assert inspect.signature(planned.forward) == inspect.signature(original.forward)
