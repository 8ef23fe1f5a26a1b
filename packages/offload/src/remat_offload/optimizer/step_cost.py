"""Measure the cost of an optimizer's step."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

from remat_executor import allocator_peak
from remat_executor.costs.device_timer import DeviceTimer
from remat_executor.current_device import as_current
from remat_offload.optimizer.private_copy import narrowed, step_tensor
from remat_offload.optimizer.trial_steps import generators_kept


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
    # Steps of large parameters may draw where profiled ones did not.
    with as_current(device), generators_kept(device):
        state = step_tensor(optimizer, settings, data, grad, None)  # creates its states
        take = partial(step_tensor, optimizer, settings, data, grad, state)
        seconds = _wall_s if device.type == "cpu" else DeviceTimer.of(device).seconds
        best_s = min(seconds(take) for _ in range(5))
        workspace = allocator_peak(take, device)
    return UpdateCost(
        s_per_element=best_s / max(1, data.numel()),
        workspace_nbytes_per_element=max(0, workspace.peak_nbytes) / max(1, data.numel()),
    )


def _wall_s(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
