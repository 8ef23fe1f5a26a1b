"""A limit that never takes effect although training runs: one warning, in a loop of one's own too."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import RematWarning
from remat_facade import Hiremate, limit_memory, planned, release
from remat_graph import Roofline

OPTIONS: dict[str, Any] = {"platform": Roofline(), "zoo": False, "time_limit_s": 1.0}


class Net(nn.Module):
    """A forward, and a method that does the same without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.training_step(x)

    def training_step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(x)).square().sum()
        return loss


class OwnOptimizer:
    """As fastai has it: not derived from torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        """Plain descent."""
        for p in self.parameters:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=1e-3)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None


def warnings_of(
    model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3, optimizer: Any = None
) -> list[str]:
    """Our warnings in some steps of training."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            call(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught if issubclass(each.category, RematWarning)]


@pytest.mark.parametrize("sample", [None, torch.randn(4, 8)])
def test_a_method_that_calls_the_parts(sample: Tensor | None) -> None:
    """As many a `training_step` does; planned at once or not. An evaluation does not count as a call."""
    model = limit_memory(Net(), "1MiB", sample=sample, **OPTIONS)
    with torch.no_grad():
        model(torch.randn(4, 8))
    (message,) = warnings_of(model, model.training_step)
    assert message == (
        "a Net with a memory limit was not called in a step of training, which ran without a plan: training "
        "calls its parts (body, head) or other methods of it; limit the module that training calls"
    )


def test_a_step_after_some_that_called_it() -> None:
    """What goes around the module later is noticed as well, once, and optimizers may take turns."""
    model = limit_memory(Net(), "1MiB", **OPTIONS)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (model.body, model.head)]

    class Both:
        def step(self) -> None:
            for each in optimizers:
                each.step()

        def zero_grad(self) -> None:
            for each in optimizers:
                each.zero_grad()

    assert warnings_of(model, model, optimizer=Both()) == []
    (message,) = warnings_of(model, model.training_step, optimizer=Both())
    assert "was not called in a step of training" in message
    assert warnings_of(model, model.training_step, optimizer=Both()) == []


def test_a_step_that_does_not_need_it_is_no_training() -> None:
    """As where one of two models is trained at every other step, and gradients are set to zero."""
    model, other = limit_memory(Net(), "1MiB", **OPTIONS), Net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1e-3)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
    calls = iter([model, other, other, model, other])

    def taking_turns(x: Tensor) -> Tensor:
        loss: Tensor = next(calls)(x)
        return loss

    assert warnings_of(model, taking_turns, steps=5, optimizer=optimizer) == []


def test_an_optimizer_whose_step_calls_that_of_its_base() -> None:
    """Torch then calls its hooks twice for one step."""

    class Own(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # makes torch call hooks in the step of the base too
    model = limit_memory(Net(), "1MiB", **OPTIONS)
    assert warnings_of(model, model, optimizer=Own(model.parameters())) == []
    assert len(warnings_of(model, model.training_step, optimizer=Own(model.parameters()))) == 1


def test_models_that_share_parameters_take_turns() -> None:
    """After a step of both, each trains the shared part and one head."""
    models = [limit_memory(Net(), "1MiB", **OPTIONS) for _ in range(2)]
    models[1].body = models[0].body
    calls = iter([models, models[:1], models[1:], models[:1]])

    def taking_turns(x: Tensor) -> Tensor:
        losses = [model(x) for model in next(calls)]
        return torch.stack(losses).sum()

    shared = list({p: None for model in models for p in model.parameters()})
    assert warnings_of(models[0], taking_turns, steps=4, optimizer=torch.optim.SGD(shared, lr=1e-3)) == []


def test_an_optimizer_that_is_not_torchs() -> None:
    """It is not seen; that gradients come again and again is."""
    model = limit_memory(Net(), "1MiB", **OPTIONS)
    (message,) = warnings_of(model, model.training_step, optimizer=OwnOptimizer(model.parameters()))
    assert "calls its parts (body, head) or other methods of it" in message
    assert warnings_of(model, model) == []
    assert hooks_of(model) == 0  # the first call takes the watch's away
    called = limit_memory(Net(), "1MiB", **OPTIONS)
    assert warnings_of(called, called, optimizer=OwnOptimizer(called.parameters())) == []


def test_a_penalty_before_the_first_call_is_no_training() -> None:
    """The weights get one gradient without a call of the model."""
    model = limit_memory(Net(), "1MiB", **OPTIONS)

    def penalized(x: Tensor) -> Tensor:
        sum(p.square().sum() for p in model.parameters()).backward()
        return model(x)

    assert warnings_of(model, penalized, optimizer=OwnOptimizer(model.parameters())) == []


def hooks_of(model: nn.Module) -> int:
    """How many hooks wait for gradients."""
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_a_submodule_and_a_copy_of_what_was_limited() -> None:
    """The parts are named that were called."""
    model = limit_memory(Net(), "1MiB", **OPTIONS)
    (message,) = warnings_of(model, lambda x: model.body(x).sum())
    assert "calls its parts (body) or" in message
    copied = copy.deepcopy(model)
    assert len(warnings_of(copied, copied.training_step)) == 1


def test_a_planned_module_whose_original_is_trained() -> None:
    """By a constructor whose result is not used."""
    model = Net()
    module = Hiremate(model, torch.randn(4, 8), "1MiB", **OPTIONS)
    (message,) = warnings_of(model, model)
    assert message.startswith("a planned Net was not called in a step of training")
    assert message.endswith("call the planned module, or use limit_memory")
    assert warnings_of(module, module) == []


def test_no_warning_where_it_is_called() -> None:
    """By itself, in another model, by a wrapper, released, or with gradients from before."""
    model = limit_memory(Net(), "1MiB", **OPTIONS)
    assert warnings_of(model, model) == []
    inside = limit_memory(Net(), "1MiB", **OPTIONS)
    outer = nn.Sequential(inside, nn.Identity())
    assert warnings_of(outer, outer) == []
    assert planned(inside) is not None
    assert warnings_of(Net(), model) == []
    released = release(limit_memory(Net(), "1MiB", **OPTIONS))
    assert warnings_of(released, released.training_step) == []
    module = Hiremate(Net(), torch.randn(4, 8), "1MiB", **OPTIONS)
    assert warnings_of(module, module) == []
    before = Net()
    before(torch.randn(4, 8)).backward()
    limit_memory(before, "1MiB", **OPTIONS)
    assert warnings_of(before, before) == []


def test_another_models_steps_say_nothing() -> None:
    """Nor do frozen parameters, and a model that is gone is forgotten."""
    frozen, other = limit_memory(Net().requires_grad_(False), "1MiB", **OPTIONS), Net()
    limited = limit_memory(Net(), "1MiB", **OPTIONS)
    assert warnings_of(other, other) == []
    assert warnings_of(nn.ModuleList([other, frozen]), other) == []
    thawed = frozen.requires_grad_(True)  # nothing of it was trainable when the watch began
    assert warnings_of(thawed, thawed) == []
    body = limited.body
    del limited
    gc.collect()
    assert warnings_of(body, lambda x: body(x).sum()) == []
