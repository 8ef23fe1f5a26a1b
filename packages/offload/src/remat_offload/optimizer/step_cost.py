"""What an optimizer's step costs: measured."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

from remat_executor import allocator_peak
from remat_offload.optimizer.private_copy import narrowed, step_tensor
from remat_offload.optimizer.trial_steps import generators_kept

_BUSY = 2048  # the side of matrices whose products take a device a fraction of a millisecond


@attrs.frozen(kw_only=True)
class UpdateCost:
    """What an optimizer takes on some device.

    Attributes:
        s_per_element: seconds for one element of a parameter.
        scratch_nbytes_per_element: what it allocates meanwhile, beyond its states.
    """

    s_per_element: float
    scratch_nbytes_per_element: float


def update_cost(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
) -> UpdateCost:
    """What the optimizer takes on a device, with the kernels that its user chose.

    Args:
        optimizer: the user's; not changed.
        group: one of its groups: its settings count.
        dtype: of parameter and gradient.
        device: where it steps.
        shape: of the tensor that is stepped to find out.
    """
    data = torch.zeros(tuple(shape), dtype=dtype, device=device)
    grad = torch.ones(tuple(shape), dtype=dtype, device=device)
    settings = narrowed(group, {})
    clock = _wall_s if device.type == "cpu" else _device_s
    with generators_kept(device):  # what is larger than a probe's parameter may draw
        state = step_tensor(optimizer, settings, data, grad, None)  # makes its states
        take = partial(step_tensor, optimizer, settings, data, grad, state)
        best_s = min(clock(take, device) for _ in range(5))
        scratch = allocator_peak(take, device)
    return UpdateCost(
        s_per_element=best_s / max(1, data.numel()),
        scratch_nbytes_per_element=max(0, scratch.peak_nbytes) / max(1, data.numel()),
    )


def _wall_s(function: Callable[[], object], device: torch.device) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def _device_s(function: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device takes; it is busy when it is given the work, which may take longer."""
    busy = torch.zeros(_BUSY, _BUSY, device=device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    for _ in range(4):
        torch.mm(busy, busy)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
