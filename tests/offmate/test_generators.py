"""Lanes leave the process' random generators alone; planning leaves them as they were."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from packages.offload.tests import optimizers
from torch import Tensor, nn, optim

from remat_facade import Hiremate
from remat_offload import LaneFailed, RefusedOptimizer, SimulatedMachine
from tests.helpers.offmates import offmate

WHOLE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "muon": lambda parameters: optim.Muon(parameters, lr=1e-2),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2),
    "lars": lambda parameters: optimizers.Lars(parameters, lr=1e-3),
}


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64, bias=False), nn.Dropout(0.3))])


def losses(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[float]:
    """Of so many steps, with nobody waiting for updates between them."""
    torch.manual_seed(1)
    x, found = torch.randn(16, 64), []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("made", WHOLE.values(), ids=WHOLE)
def test_masks_beside_updates(made: Callable[[Any], optim.Optimizer]) -> None:
    """Optimizers that step whole parameters, on the CPU's lane, leave a model its masks."""
    plain, moved = with_dropout(), with_dropout()
    optimizer = made(moved.parameters())
    ours = offmate(moved, torch.randn(16, 64), "50%", optimizer=optimizer)
    assert ours.plan.on_host
    assert losses(plain, made(plain.parameters()), 5) == losses(ours, optimizer, 5)


VIOLATIONS: dict[str, Callable[[], object]] = {
    "fork_rng": lambda: torch.random.fork_rng([]).__enter__(),
    "set_rng_state": lambda: torch.set_rng_state(torch.get_rng_state()),
    "draw": lambda: torch.rand(1),
    "given": lambda: torch.rand(1, generator=torch.default_generator),
    "normal_": lambda: torch.zeros(1).normal_(),
    "dropout": lambda: nn.functional.dropout(torch.ones(3)),
    "python": random.random,
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS)
def test_the_watcher_sees(violation: Callable[[], object], draws_in_lanes: list[str]) -> None:
    """Whatever touches a generator of the process in a lane is noted, and fails any test."""
    with SimulatedMachine() as machine:
        machine.work(violation, name="planted").synchronize()
    noted = [*draws_in_lanes]
    draws_in_lanes.clear()
    assert noted
    assert all("in 'planted' on the lane" in line for line in noted)


def test_the_watcher_is_not_alarmed(draws_in_lanes: list[str]) -> None:
    """A generator of one's own, and draws in the user's thread, are nobody's loss."""
    own = torch.Generator()
    with SimulatedMachine() as machine:
        ticket = machine.work(lambda: torch.rand(1, generator=own))
        torch.rand(1)
        ticket.synchronize()
    assert [] == draws_in_lanes


@pytest.mark.parametrize("made", [optimizers.Noise, optimizers.NumpyNoise, optimizers.PythonNoise])
def test_optimizers_that_draw(made: type[optim.Optimizer]) -> None:
    """They would draw beside the model, in an order that nobody knows: they are refused in one line."""
    model = with_dropout()
    optimizer = made(model.parameters())  # type: ignore[call-arg]
    with pytest.raises(RefusedOptimizer, match="its step draws random numbers from") as caught:
        offmate(model, torch.randn(16, 64), "50%", optimizer=optimizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("budget", ["50%", "100%"])
@pytest.mark.parametrize("generator", [None, torch.default_generator], ids=["none", "torch's"])
def test_optimizers_that_draw_late(budget: str, generator: torch.Generator | None) -> None:
    """Later than anybody looked when they were tried out: refused as they draw, on either side."""
    model = with_dropout()
    optimizer = optimizers.LateNoise(model.parameters(), 1e-3, generator)
    ours = offmate(model, torch.randn(16, 64), budget, optimizer=optimizer)
    losses(ours, optimizer, 19)
    with pytest.raises((RefusedOptimizer, LaneFailed), match="its step draws random numbers") as caught:
        losses(ours, optimizer, 2)
    assert "\n" not in str(caught.value)
    with contextlib.suppress(LaneFailed):
        ours.close()


@pytest.mark.parametrize("made", [optimizers.LateNoise, optimizers.LateNumpyNoise])
def test_optimizers_that_are_told_to_draw(made: type[optim.Optimizer]) -> None:
    """A setting that is turned on has them tried out again, and no parameter was stepped yet."""
    model = with_dropout()
    optimizer = made(model.parameters())  # type: ignore[call-arg]
    ours = offmate(model, torch.randn(16, 64), "50%", optimizer=optimizer)
    losses(ours, optimizer, 2)
    before = [p.detach().clone() for p in ours.parameters()]
    optimizer.param_groups[0]["noise"] = 0.1
    with pytest.raises(RefusedOptimizer, match="its step draws random numbers from"):
        losses(ours, optimizer, 1)
    assert all(map(torch.equal, before, ours.parameters()))


def generators() -> tuple[Any, list[Tensor], str]:
    return random.getstate(), [torch.get_rng_state()], repr(np.random.get_state())


@pytest.mark.parametrize("made", [*WHOLE.values(), optim.AdamW], ids=[*WHOLE, "adamw"])
def test_building_draws_nothing(made: Callable[[Any], optim.Optimizer], tmp_path: Any) -> None:
    """Planning, with the optimizer tried out, its speed and the operators' measured, changes no generator."""
    model = with_dropout()
    before = generators()
    offmate(
        model,
        torch.ones(16, 64),
        "50%",
        optimizer=made(model.parameters()),
        platform=None,
        links=None,
        cache_dir=tmp_path,
    )
    after = generators()
    assert before[0] == after[0]
    assert torch.equal(before[1][0], after[1][0])
    assert before[2] == after[2]


def test_building_for_the_device_alone_draws_nothing(tmp_path: Any) -> None:
    """So it is where nothing moves."""
    model = with_dropout()
    before = generators()
    Hiremate(model, torch.ones(16, 64), "100%", cache_dir=tmp_path)
    after = generators()
    assert before[0] == after[0]
    assert torch.equal(before[1][0], after[1][0])
    assert before[2] == after[2]
