"""What a planned module offers as an `nn.Module`: hooks, copies, state dicts, attributes, submodules."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat_executor import BadInput, PlannedModule, RematWarning, UnplannedUse
from tests.helpers.planners import repeat_at_random
from tests.helpers.small import Heads, Net
from tests.helpers.steps import assert_same_step, pair


def test_copies_share_plans_and_pickling_is_refused(cache: Path) -> None:
    """A deep copy trains by itself; a pickle is one clear error."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    for _ in range(3):
        copied = copy.deepcopy(planned)
        assert_same_step(copy.deepcopy(original), copied, x)
        assert copied.runs == {"planned": 1}
        assert copied.first.weight is not planned.first.weight
    with pytest.raises(UnplannedUse, match="state_dict"):
        pickle.dumps(planned)


def test_global_hooks_are_called(cache: Path) -> None:
    """Hooks for all modules: the original runs."""
    x = torch.randn(5, 6)
    _, planned = pair(Net(), cache, x)
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        with pytest.warns(RematWarning, match="hooks"):
            planned(x)
    finally:
        handle.remove()
    assert seen


def test_hooks_there_at_the_start_are_refused(cache: Path) -> None:
    """The error names the submodule."""
    model = Net()
    model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(BadInput, match="'norm' has hooks"):
        pair(model, cache, torch.randn(5, 6))


def test_the_modules_own_hooks_are_called_around_its_plan(cache: Path) -> None:
    """There at the start or added to either; the plan runs between them."""
    x = torch.randn(5, 6)
    model = nn.Linear(6, 6)
    expected = 3 * model(2 * x)
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    planned = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=cache)
    planned.register_forward_hook(lambda _, args, output: 3 * output)
    for module in (planned, model):
        assert torch.equal(expected, module(x))
    assert planned.runs == {"planned": 1}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_hooks_added_later_are_called(cache: Path) -> None:
    """The original runs, and so the hook does."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    seen = []
    planned.norm.register_forward_hook(lambda *_: seen.append(1))
    assert_same_step(original, planned, x)
    assert seen == [1]
    assert planned.runs == {"original": 1}


def test_parameter_hooks_are_called(cache: Path) -> None:
    """Hooks on gradients and after accumulation see what eager shows them."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    seen: list[list[Any]] = [[], []]
    for module, record in zip((original, planned), seen, strict=True):
        module.trunk.weight.register_hook(lambda g, record=record: record.append(g.clone()) or g * 2)
        module.left.bias.register_post_accumulate_grad_hook(
            lambda p, record=record: record.append(p.grad.clone())
        )
        module(x)["left"].square().sum().backward()
    assert len(seen[0]) == len(seen[1]) == 2
    for expected, actual in zip(*seen, strict=True):
        assert torch.equal(expected, actual)
    assert torch.equal(original.trunk.weight.grad, planned.trunk.weight.grad)


def test_state_dict_and_attributes_are_the_originals(cache: Path) -> None:
    """Keys, loading, and what the planned module does not have itself."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    assert original.state_dict().keys() == planned.state_dict().keys()
    planned.load_state_dict(original.state_dict())
    assert planned.drop.p == 0.3
    assert [n for n, _ in planned.named_parameters()] == [n for n, _ in original.named_parameters()]
    with pytest.raises(AttributeError):
        _ = planned.nothing_of_this_name


def test_compile_on_the_planned_module_itself(cache: Path) -> None:
    """`planned.compile()`: said to change nothing; the plan runs, the original is as before."""
    x = torch.randn(5, 6)
    original, planned = pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), cache, x)
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        planned.compile(backend="eager")
    assert_same_step(original, planned, x)
    assert planned.runs["planned"] == 1
    assert torch.equal(original(x), planned.module(x))
    copied = copy.deepcopy(planned)
    assert_same_step(original, copied, x)
    assert copied.runs["planned"] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(5, 6))])
@pytest.mark.parametrize("inner", [False, True])
def test_torchscript_is_refused_by_name(compiled: Any, inner: bool, cache: Path) -> None:
    """One line that says which module it is; a scripted submodule alone can be planned."""
    model = compiled(nn.Linear(6, 6))
    if inner:
        model = nn.Sequential(model)
    if inner and compiled is torch.jit.script:
        x = torch.randn(5, 6)
        assert torch.equal(PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=cache)(x), model(x))
        return
    with pytest.raises(
        BadInput, match="submodule '0' is TorchScript" if inner else "the model is TorchScript"
    ):
        PlannedModule(model, (torch.randn(5, 6),), {}, repeat_at_random(1), cache_dir=cache)


def test_an_index_reaches_the_originals_submodules(cache: Path) -> None:
    """As of a `Sequential`; another module has none."""
    _, planned = pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), cache, torch.randn(5, 6))
    assert planned[0] is planned.module[0]
    _, plain = pair(nn.Linear(6, 8), cache, torch.randn(5, 6))
    with pytest.raises(TypeError, match="not subscriptable"):
        plain[0]
    assert plain
