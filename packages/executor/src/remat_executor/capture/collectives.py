"""Refuse collectives inside a step: capture would send them with tensors that hold no values.

A collective that runs during a trace hangs, fails far from its line, or is left out, and a plan that repeats
one would have to repeat it on every rank at the same place. Engines around a module are unaffected: DDP and
`fully_shard` communicate in hooks. A collective in the backward alone is detected only if it is functional.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.errors import CaptureError


def no_collectives() -> AbstractContextManager[object]:
    """A context in which a collective raises a `CaptureError` before it is sent."""
    if not (dist.is_available() and dist.is_initialized()):
        return nullcontext()
    return _NoCollectives()  # type: ignore[no-untyped-call]


class _NoCollectives(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_collective(func)
        return func(*args, **(kwargs or {}))


def refuse_collective(target: object) -> None:
    """Refuse an operator that communicates with other ranks.

    Raises:
        CaptureError: the operator is a collective.
    """
    if str(target).startswith(("c10d", "_c10d_functional", "symm_mem")):
        raise CaptureError(
            problem=f"the step communicates with other ranks ({target})",
            advice="plan the submodules on either side of it; SyncBatchNorm and tensor parallelism do that",
        )
