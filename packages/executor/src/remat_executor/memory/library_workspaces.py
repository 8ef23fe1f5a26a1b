"""Let libraries allocate what they keep, before a step is measured.

cuBLAS keeps a workspace (32 MiB on an H100) for each thread and stream that multiplies matrices, and torch
takes it from the allocator that also holds tensors. A training step multiplies in two threads: the caller's,
and autograd's thread of the device. Without a warm-up the first forward and the first backward would allocate
these workspaces, and they would seem to belong to the step.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from remat_executor.errors import warn
from remat_executor.torch_private.autograd import apply_plainly

_SIZE = 64
"""Rows and columns of the matrices: each library is used for sizes above 1."""


class _InBothThreads(torch.autograd.Function):
    """Runs some work in the forward, and again in the thread in which autograd runs the device's backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        work()
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.work()
        return gradients[0], None


def warm_up_libraries(device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> None:
    """Multiply small matrices on a device, in this thread and in autograd's, on the current stream.

    The workspaces stay allocated. Repeating this costs well below a millisecond of the device's time.

    Args:
        device: the device.
        dtypes: those of the model, in addition to float32 and bfloat16.
    """
    floating = {t for t in dtypes if t.is_floating_point or t.is_complex} | {torch.float32, torch.bfloat16}

    def work() -> None:
        for dtype in floating:
            with contextlib.suppress(RuntimeError):  # this device has no products of this dtype
                _multiply(device, dtype)

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        token = torch.zeros(1, device=device, requires_grad=True)
        made = apply_plainly(_InBothThreads, token, work)
        torch.autograd.grad(made, token, torch.zeros(1, device=device))
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def warn_of_trials(device: torch.device, targets: Iterable[str]) -> None:
    """Warn if cuDNN is to choose the algorithms of convolutions by trials.

    Args:
        device: where the step runs.
        targets: the operators of the step.
    """
    if device.type != "cuda" or not torch.backends.cudnn.benchmark:
        return
    if any("convolution" in target for target in targets):
        warn(
            "torch.backends.cudnn.benchmark is on: cuDNN tries algorithms again in each thread, so the first "
            "backward may exceed the budget, and a recomputed convolution may have other last bits; set it "
            "to False before planning"
        )


@torch.no_grad()
def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    """The products that torch gives to different libraries."""
    matrix = torch.zeros(_SIZE, _SIZE, dtype=dtype, device=device)
    bias = torch.zeros(_SIZE, dtype=dtype, device=device)
    torch.mm(matrix, matrix)
    torch.addmm(bias, matrix, matrix)
    torch.bmm(matrix[None], matrix[None])
