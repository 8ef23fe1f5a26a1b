"""Optimizers as other people write them: small, and each odd in one way."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class Simple(Optimizer):
    """Steps each parameter with ``update(param, grad, state, group)``."""

    def __init__(self, params: Params, lr: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Lion(Simple):
    """The sign of an interpolation; one state, made by assignment."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * 0.1).add_(state["exp_avg"].lerp(grad, 0.1).sign_(), alpha=-group["lr"])
        state["exp_avg"].lerp_(grad, 0.01)


class Odd(Simple):
    """States under odd names, one made at the second step, one replaced at each; two that change places."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state |= {"n": 0, "Größe 0": [1.0, 2], "this": torch.ones_like(p), "that": grad.clone()}
        elif "seen before" not in state:
            state["seen before"] = grad * grad
        state["n"] += 1
        state["Größe 0"] = [state["n"] / 2, 2]
        state["this"], state["that"] = state["that"], state["this"] * 0.5 + grad
        if "seen before" in state:
            state["seen before"] = state["seen before"] * 0.9 + p.abs() * group["lr"]
        p.sub_(state["this"] * group["lr"] / (1 + state["n"]))


class Filled(Simple):
    """State made by the constructor alone."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.5), "step": torch.tensor([0.0])}

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        state["step"] += 1
        state["sum"].addcmul_(grad, grad)
        p.addcdiv_(grad, state["sum"].sqrt(), value=-group["lr"])


class Touching(Simple):
    """No state, but an entry for every parameter."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"])


class Lars(Simple):
    """One parameter's norm scales its step."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad * (p.norm() / grad.norm()), alpha=-group["lr"])


class MatrixDecay(Simple):
    """Weight decay for what has two dimensions."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad + (p if p.dim() > 1 else 0), alpha=-group["lr"])


class Blocks(Simple):
    """A scale for each 256 elements, for parameters with more than 4096, as 8-bit optimizers keep."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            size = 256 if p.numel() > 4096 else p.numel()
            state["scales"] = torch.zeros(-(-p.numel() // size))
        p.add_(grad, alpha=-group["lr"] * float(state["scales"].add_(1).max()))


class GlobalClip(Simple):
    """The norm of all gradients scales every step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.clip = 1 / max(1.0, float(torch.stack([grad.norm() for grad in grads]).norm()))
        super().step()

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"] * self.clip)


class Noise(Simple):
    """Draws for one parameter after another."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad + torch.randn_like(p), alpha=-group["lr"])


class LateNoise(Simple):
    """Draws from its twentieth step on, or once it is told to."""

    def __init__(self, params: Params, lr: float = 1e-2, generator: torch.Generator | None = None) -> None:
        super().__init__(params, lr, noise=0.0)
        self.generator = generator

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] >= 20 or group["noise"]:
            grad = grad + torch.empty_like(grad).normal_(generator=self.generator)
        p.add_(grad, alpha=-group["lr"])


class LateNumpyNoise(Simple):
    """Draws from numpy's global generator once it is told to."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, lr, noise=0.0)

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"] * (np.random.rand() if group["noise"] else 1.0))


class NumpyNoise(Simple):
    """Draws one number for every parameter, from numpy's global generator."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"] * np.random.rand())


class PythonNoise(Simple):
    """Draws a number and forgets it, so that results do not show it."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        random.random()
        p.add_(grad, alpha=-group["lr"])


class Counting(Simple):
    """Counts steps in an attribute."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.steps = self.steps + 1
        super().step()

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"])


class Scheduled(Simple):
    """Counts steps in its groups, as schedule-free ones do."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] += 1

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        p.add_(grad, alpha=-group["lr"] / (1 + group["k"]))


class Common(Simple):
    """Keeps something for all under a name of its own."""

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        self.state["all"] = {"last": grad.sum()}
        p.add_(grad, alpha=-group["lr"])


class Lookahead(Optimizer):
    """Holds the optimizer that does the work."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 1.0})
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step()


class Forwarding(Lookahead):
    """Shows the groups and the state of the optimizer that it holds."""

    param_groups = property(lambda self: self.inner.param_groups, lambda self, value: None)
    state = property(lambda self: self.inner.state, lambda self, value: None)

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
