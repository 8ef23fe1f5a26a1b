"""Measure the cost of an optimizer's step."""

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

_BUSY = 2048  # the side of matrices whose product takes a device a fraction of a millisecond


@attrs.frozen(kw_only=True)
class UpdateCost:
    """The cost of an optimizer's step on a device, for each element of a parameter."""

    s_per_element: float
    workspace_nbytes_per_element: float  # what the step allocates beyond the states


def update_cost(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
) -> UpdateCost:
    """Measure a step of one tensor with a group's settings; the optimizer is not changed."""
    data = torch.zeros(tuple(shape), dtype=dtype, device=device)
    grad = torch.ones(tuple(shape), dtype=dtype, device=device)
    settings = narrowed(group, {})
    clock = _wall_s if device.type == "cpu" else _device_s
    with generators_kept(device):  # steps of large parameters may draw where profiled ones did not
        state = step_tensor(optimizer, settings, data, grad, None)  # creates its states
        take = partial(step_tensor, optimizer, settings, data, grad, state)
        best_s = min(clock(take, device) for _ in range(5))
        workspace = allocator_peak(take, device)
    return UpdateCost(
        s_per_element=best_s / max(1, data.numel()),
        workspace_nbytes_per_element=max(0, workspace.peak_nbytes) / max(1, data.numel()),
    )


def _wall_s(function: Callable[[], object], device: torch.device) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def _device_s(function: Callable[[], object], device: torch.device) -> float:
    """Return the device's seconds; the device is kept busy while the host submits the step."""
    busy = torch.zeros(_BUSY, _BUSY, device=device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    for _ in range(4):
        torch.mm(busy, busy)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
