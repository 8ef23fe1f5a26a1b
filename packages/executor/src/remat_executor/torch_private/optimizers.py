"""Private names of torch's optimizers: count, replace and hook their steps."""

import types
from collections.abc import Callable, Generator
from typing import Any

import torch

from remat_graph.contexts import context


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler know that the optimizer has stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Replace one optimizer's step by `step(optimizer, closure)`; a scheduler still notices steps."""

    def stepped(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        mark_stepped(self)
        return step(self, closure)

    method = types.MethodType(stepped, optimizer)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = method  # type: ignore[method-assign]


@context
def step_hooks(optimizer: torch.optim.Optimizer) -> Generator[None, None, None]:
    """Call a user's step hooks of an optimizer, before and after the body."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})
    yield
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (), {})
