"""Collectives inside a step are refused: capture would send them with tensors that hold nothing.

Run for a trace, a collective hangs, fails far from its line, or is left out; and a plan that repeated one
would have to do so on every rank at the same place. What the engines around a module send is none of this:
DDP and `fully_shard` work from hooks. Not seen is one in the backward alone that is not a functional one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.errors import CaptureError


def no_collectives() -> AbstractContextManager[object]:
    """Refuse collectives in a forward while it is traced.

    Raises:
        CaptureError: at the first one, before it is sent.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return nullcontext()
    return _NoCollectives()  # type: ignore[no-untyped-call]


class _NoCollectives(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_collective(func)
        return func(*args, **(kwargs or {}))


def refuse_collective(target: object) -> None:
    """Refuse an operator that speaks to other ranks.

    Raises:
        CaptureError: it does.
    """
    if str(target).startswith(("c10d", "_c10d_functional", "symm_mem")):
        raise CaptureError(
            problem=f"the step speaks to other ranks ({target})",
            advice="plan the submodules on either side of it; SyncBatchNorm and tensor parallelism do that",
        )
