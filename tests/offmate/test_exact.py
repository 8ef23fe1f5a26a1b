"""A model trained by `Offmate` has the bits of one trained plainly: losses, parameters, buffers, states."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate

# What the whole of training holds is 100 %, and what gradients to add to take beside it is more; the smallest
# budgets are near the least that a plan takes.
CASES = [
    ("llama", "adamw", "150%", False, 1),
    ("llama", "adamw", "35%", False, 4),
    ("llama", "sgd", "45%", True, 1),
    ("convolutions", "sgd", "60%", False, 4),
    ("convolutions", "adamw", "60%", True, 1),
]


@pytest.mark.parametrize(("name", "kind", "budget", "in_backward", "accumulation"), CASES)
def test_the_bits_of_plain_training(
    name: str, kind: str, budget: str, in_backward: bool, accumulation: int
) -> None:
    """Dropout, tied weights, clipping, accumulation, a cosine schedule; both styles of stepping."""
    make, batches = MODELS[name]
    runs = []
    for ours in (False, True):
        model = make()
        optimizer = OPTIMIZERS[kind](model.parameters())
        called = model
        if ours:
            called = offmate(
                model, batches(0), budget, optimizer=optimizer, optimizer_in_backward=in_backward
            )
            assert called.optimizer is optimizer
        run = Run(called, optimizer, batches, accumulation=accumulation, in_backward=in_backward)
        runs.append(run.train(4))
    assert [] == differences(*runs)
    assert called.runs["planned"] == 4 * accumulation
    assert (budget != "150%") == (called.plan.host_peak_nbytes > 0)
    assert "weights, gradients and states need" in called.plan.summary()  # and why they are where they are


def test_clipping_while_stepping() -> None:
    """The module's own clipping scales gradients as they are used, and returns the same norm."""
    make, batches = MODELS["llama"]
    runs, norms = [], []
    for ours in (False, True):
        model = make()
        found: list[Any] = []
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        called = offmate(model, batches(0), "45%", optimizer=optimizer) if ours else model

        def clip(
            parameters: Any, most: Any, called: Any = called, found: Any = found, ours: Any = ours
        ) -> None:
            parameters = list(parameters)
            norm = called.clip_grad_norm_(most) if ours else torch.nn.utils.clip_grad_norm_(parameters, most)
            found.append(norm.item())

        runs.append(Run(called, optimizer, batches, clip=clip).train(3))
        norms.append(found)
    assert norms[0] == norms[1]
    assert max(norms[0]) > 1.0, "nothing was clipped"
    assert [] == differences(*runs)


class Matrices(nn.Module):
    """Nothing but matrices, which is what some optimizers step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)) for _ in range(3)]
        self.layers = nn.Sequential(*(layer for a, b in pairs for layer in (a, nn.GELU(), b)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("kind", "in_backward"), [(torch.optim.Adafactor, True), (torch.optim.Muon, False)])
def test_optimizers_that_step_whole_tensors(kind: type[Any], in_backward: bool) -> None:
    """What they keep and do depends on a parameter's shape."""

    def batches(step: Any) -> Any:
        return {"x": torch.randn(8, 32, generator=torch.Generator().manual_seed(step))}

    runs = []
    for ours in (False, True):
        model = Matrices()
        optimizer = kind(model.parameters(), lr=1e-2)
        called = model
        if ours:
            called = offmate(model, batches(0), "60%", optimizer=optimizer, optimizer_in_backward=in_backward)
        runs.append(Run(called, optimizer, batches, in_backward=in_backward).train(3))
    assert [] == differences(*runs)
    assert called.plan.host_peak_nbytes > 0


class Masters:
    """Plain training in bfloat16 with an optimizer over float32 copies."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model = model
        self.wide = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = OPTIMIZERS[kind](self.wide)

    def step(self) -> None:
        """Step the copies by the model's gradients, and round them back."""
        for wide, narrow in zip(self.wide, self.model.parameters(), strict=True):
            wide.grad = narrow.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(self.wide, self.model.parameters(), strict=True):
                narrow.copy_(wide)


@pytest.mark.parametrize(
    ("budgets", "in_backward"),
    [
        (("45%", "150%"), True),
        (("150%", "45%"), False),
        pytest.param(("45%", "150%"), False, marks=pytest.mark.full),
        pytest.param(("150%", "45%"), True, marks=pytest.mark.full),
    ],
)
def test_master_weights_are_gone_on_from(budgets: tuple[str, str], in_backward: bool) -> None:
    """By a module that is built anew with the same optimizer, with updates under way, in other places."""
    make, batches = MODELS["llama"]
    found = []
    for anew in (False, True):
        model = make().bfloat16()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        build = functools.partial(
            offmate,
            model,
            batches(0),
            optimizer=optimizer,
            optimizer_in_backward=in_backward,
            master_weights=True,
        )
        called = build(budgets[0])
        for step in range(6):
            if anew and step in (2, 4):
                called = build(budgets[step // 2 % 2])
            torch.manual_seed(step)
            called(**batches(step)).loss.backward()
            if not in_backward:
                optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        states = optimizer.state_dict()["state"].items()
        kept = {f"{i}.{name}": torch.as_tensor(t) for i, state in states for name, t in state.items()}
        assert sum(name.endswith("master") for name in kept) == len(list(model.parameters()))
        found.append({name: t.clone() for name, t in (called.state_dict() | kept).items()})
    assert found[0].keys() == found[1].keys()
    assert [] == [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


@pytest.mark.parametrize(("budget", "in_backward"), [("150%", False), ("45%", True)])
def test_master_weights(budget: str, in_backward: bool) -> None:
    """Parameters in 16 bits stepped in 32: masters, moments, what is rounded from them; saved and loaded."""
    make, batches = MODELS["llama"]
    plain = Masters(make().bfloat16(), "adamw")
    model = make().bfloat16()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    ours = offmate(
        model,
        batches(0),
        budget,
        optimizer=optimizer,
        optimizer_in_backward=in_backward,
        master_weights=True,
    )
    for step in range(6):
        losses = []
        for called, stepping in ((plain.model, plain), (ours, optimizer)):
            torch.manual_seed(step)
            loss = called(**batches(step)).loss
            loss.backward()
            losses.append(loss.item())
            if not (in_backward and called is ours):
                stepping.step()
            called.zero_grad()
        assert losses[0] == losses[1]
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()["state"]
    for index, (wide, narrow) in enumerate(zip(plain.wide, ours.parameters(), strict=True)):
        assert torch.equal(wide, saved[index]["master"])
        assert torch.equal(wide.bfloat16(), narrow)
        assert saved[index]["exp_avg"].dtype == torch.float32
        assert torch.equal(plain.optimizer.state[wide]["exp_avg"], saved[index]["exp_avg"])


class Scaled(nn.Module):
    """Has a parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * self.scale).square().mean() + self.nothing.sum()
        return loss


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_parameters_without_dimensions_or_elements(kind: str) -> None:
    torch.manual_seed(0)
    plain = Scaled()
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8)
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (plain, model)]
    planned = offmate(model, x, "150%", optimizer=optimizers[1])
    for _ in range(2):
        for called, optimizer in zip((plain, planned), optimizers, strict=True):
            called(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
