"""Gradients that the plan of the latest forward does not know are stepped by as plain training does."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from remat_facade import Hiremate
from remat_offload import OffloadMisuse, SimulatedMachine
from remat_offload.copy_lanes.threaded import Job
from tests.helpers.offmates import OPTIMIZERS, PLATFORM, offmate


class Heads(nn.Module):
    """A trunk with two heads, a part that no forward uses, and a scale that its caller reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.heads = nn.ModuleDict({name: nn.Linear(32, 8) for name in "ab"})
        self.unused = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        return self.heads[head](self.trunk(x)).square()


def batch(seed: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def bits(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and states, copied."""
    states = optimizer.state_dict()["state"].items()
    found = {f"{i}.{name}": torch.as_tensor(value) for i, state in states for name, value in state.items()}
    return {name: value.clone() for name, value in (module.state_dict() | found).items()}


def two_heads(model: Any, optimizer: Any, step: Any) -> None:
    """One step for the gradients of both."""
    for head in "ab":
        model(batch(step), head).mean().backward()


def scaled(model: Any, optimizer: Any, step: Any) -> None:
    """The scale gets its gradient outside of the model."""
    (model(batch(step)).mean() * model.scale.exp()).backward()


def frozen_between(model: Any, optimizer: Any, step: Any) -> None:
    """What is frozen has a gradient from before."""
    model(batch(step)).mean().backward()
    if step == 1:
        model.trunk.requires_grad_(False)
        model(batch(9)).mean().backward()


@pytest.mark.filterwarnings("ignore:.*called in another way:remat_executor.errors.RematWarning")
@pytest.mark.parametrize("backwards", [two_heads, scaled, frozen_between])
@pytest.mark.parametrize("budget", ["150%", "60%"])
def test_every_gradient_is_stepped_by(backwards: Callable[..., Any], budget: str) -> None:
    """Of another forward, of something outside of the model, of what has been frozen since."""
    found = []
    for ours in (False, True):
        model = Heads()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        called = model
        if ours:
            sample = {"x": batch(0), "head": "a"}
            called = offmate(model, sample, budget, optimizer=optimizer)
        for step in range(3):
            backwards(called, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(bits(called, optimizer))
    assert (budget == "60%") == (called.plan.host_peak_nbytes > 0)
    assert found[0].keys() == found[1].keys()
    assert [] == [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


def penalized(model: Any) -> Any:
    """Some of the loss is of the parameters themselves."""
    return model(batch(0)).mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*called in another way:remat_executor.errors.RematWarning")
@pytest.mark.parametrize(
    "meet",
    [
        lambda ours: ours(batch(1)),
        lambda ours: ours.synchronize(),
        lambda ours: ours.state_dict(),
        lambda ours: ours.optimizer.state_dict(),
    ],
)
@pytest.mark.parametrize("loss", [penalized, lambda model: model(batch(0)).mean() * model.scale.exp()])
def test_gradients_that_a_backward_cannot_step_by(loss: Callable[..., Any], meet: Callable[..., Any]) -> None:
    """They come when it has stepped: told, and training goes on without them."""
    ours = offmate(Heads(), batch(0), "60%", accumulation=2)
    loss(ours).backward()
    with pytest.raises(OffloadMisuse, match=r"left in \.grad; call zero_grad\(\)") as caught:
        meet(ours)
    assert "\n" not in str(caught.value)
    for p in ours.parameters():  # a way to drop them, too
        p.grad = None
    meet(ours)
    with ours.accumulating():  # in a step of several backwards, the last one's come late
        loss(ours).backward()
        meet(ours)
    meet(ours)
    loss(ours).backward()
    with pytest.raises(OffloadMisuse, match=r"left in \.grad"):
        meet(ours)
    ours.zero_grad()
    meet(ours)
    ours(batch(1)).mean().backward()
    for p in ours.parameters():
        p.grad = torch.zeros_like(p)
    meet(ours)


@pytest.mark.filterwarnings("ignore:.*called in another way:remat_executor.errors.RematWarning")
def test_what_was_added_up_and_not_stepped_by() -> None:
    """The other head has a gradient of before, and the backward that steps is not of its forward."""
    ours = offmate(Heads(), {"x": batch(0), "head": "a"}, "60%", accumulation=2)
    with ours.accumulating():
        ours(batch(0), "b").mean().backward()
    for p in ours.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5  # whoever scales them may
    ours(batch(1), "a").mean().backward()
    with pytest.raises(OffloadMisuse, match=r"heads\.b\.weight, heads\.b\.bias got others"):
        ours(batch(2), "a")


def test_parameters_of_another_module() -> None:
    """Nothing would step them."""
    model, other = Heads(), nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS["adamw"](iter([*model.parameters(), other]))
    with pytest.raises(OffloadMisuse, match=r"the model does not: 1, of \(3,\)") as caught:
        offmate(model, batch(0), "60%", optimizer=optimizer)
    assert "\n" not in str(caught.value)


def test_a_scaler_and_a_fused_optimizer() -> None:
    """It lends the optimizer its numbers only while `step` runs, and updates on the CPU go on then."""
    found = []
    for ours in (False, True):
        model = Heads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        called = offmate(model, batch(0), "60%", optimizer=optimizer) if ours else model
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        for step in range(4):
            scaler.scale(called(batch(step)).mean()).backward()
            if step == 2:
                model.trunk[0].bias.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(bits(called, optimizer))
    assert [] == [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


class Late(SimulatedMachine):
    """Updates on the CPU begin late enough to run while a module is captured."""

    def work(self, function: Callable[..., Any], after: list[Any] = (), name: str = "") -> Job:
        """Work, later."""

        def late() -> None:
            time.sleep(0.03)
            function()

        return super().work(late, after, name)


@pytest.mark.filterwarnings("ignore:.*called in another way:remat_executor.errors.RematWarning")
def test_planning_anew_right_after_a_step() -> None:
    """What capture sets for the whole process is not seen by updates that are under way."""
    found = []
    for ours in (False, True):
        model = Heads()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        called = offmate(model, batch(0), "60%", optimizer=optimizer, machine=Late()) if ours else model
        for rows in (8, 8, 6, 5, 4):
            called(batch(rows)[:rows]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(bits(called, optimizer))
    assert [] == [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


def test_another_module_is_planned_right_after_a_step() -> None:
    """Its capture waits for nobody's updates; they are not told that they are being compiled."""
    found = []
    for ours in (False, True):
        model = Heads()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        called = offmate(model, batch(0), "60%", optimizer=optimizer, machine=Late()) if ours else model
        for step in range(4):
            called(batch(step)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ours:
                Hiremate(Heads(), batch(0)[: 5 + step], "100%", platform=PLATFORM, zoo=False)
        found.append(bits(called, optimizer))
    assert [] == [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


def test_a_copy_of_the_original_right_after_a_step() -> None:
    """Whoever copies a parameter whose update is under way gets an ordinary one, up to date."""
    outputs = []
    for ours in (False, True):
        model = Heads()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        called = offmate(model, batch(0), "60%", optimizer=optimizer) if ours else model
        called(batch(0)).mean().backward()
        optimizer.step()
        copied = copy.deepcopy(model)
        assert {nn.Parameter} == set(map(type, copied.parameters()))
        outputs.append(copied(batch(1)))
    assert torch.equal(*outputs)
