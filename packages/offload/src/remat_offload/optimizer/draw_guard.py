"""Refuse updates that draw random numbers from the process' generators, also after the profiled steps.

Plain training draws for an update between the masks of two steps; here an update would draw concurrently with
the model, in an unknown order. Operators that draw are known by their tag. Torch's own classes draw nothing.
Draws from Python's and numpy's generators are found only by the profile.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.generator_state import default_generator
from remat_executor.torch_private.generators import is_generator
from remat_offload.errors import RefusedOptimizer


def is_from_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim")


def without_draws(optimizer: Optimizer) -> contextlib.AbstractContextManager[object]:
    """Refuse operators of this thread, inside the context, that draw from a generator of the process."""
    return contextlib.nullcontext() if is_from_torch(optimizer) else _NoDraws(type(optimizer).__name__)


class _NoDraws(TorchDispatchMode):
    def __init__(self, optimizer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and _of_process(kwargs.get("generator"), args):
            raise RefusedOptimizer(
                optimizer=self._optimizer,
                problem=f"its step draws random numbers ({func}) concurrently with the model",
                advice="use an optimizer that draws none, or that has a generator for each parameter",
            )
        return func(*args, **kwargs)


@functools.cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _of_process(generator: torch.Generator | None, args: Iterable[Any]) -> bool:
    if generator is None:
        generator = next((each for each in args if isinstance(each, torch.Generator)), None)
    return generator is None or is_generator(generator, default_generator(generator.device))
