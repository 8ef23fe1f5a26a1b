"""Updates draw no random numbers from the process' generators, whatever they do later than a probe looked.

Plain training draws between the masks of one step and of the next, in its parameters' order; here an update
draws beside the model, in an order that nobody knows. Operators that draw are known by their tag. Torch's own
classes draw nothing. What Python's and numpy's generators give goes unseen: only a probe looks at them.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.rng import default_generator
from remat_executor.torch_private.generators import is_generator
from remat_offload.errors import RefusedOptimizer


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim")


def without_draws(optimizer: Optimizer) -> contextlib.AbstractContextManager[object]:
    """Within it an operator that draws from a generator of the process is refused, in this thread."""
    return contextlib.nullcontext() if is_torchs(optimizer) else _NoDraws(type(optimizer).__name__)


class _NoDraws(TorchDispatchMode):
    def __init__(self, optimizer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and _of_process(kwargs.get("generator"), args):
            raise RefusedOptimizer(
                optimizer=self._optimizer,
                problem=f"its step draws random numbers ({func}) beside what the model draws",
                advice="train with one that does not, or whose generators are its parameters' own",
            )
        return func(*args, **kwargs)


@functools.cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _of_process(generator: torch.Generator | None, args: Iterable[Any]) -> bool:
    if generator is None:
        generator = next((each for each in args if isinstance(each, torch.Generator)), None)
    return generator is None or is_generator(generator, default_generator(generator.device))
