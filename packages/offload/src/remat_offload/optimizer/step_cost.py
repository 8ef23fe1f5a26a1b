"""Measure the cost of an optimizer's step."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from remat_executor import allocator_peak
from remat_executor.costs.device_timer import DeviceTimer
from remat_executor.current_device import as_current
from remat_offload.optimizer.chunked_step import ChunkedStep
from remat_offload.optimizer.chunking import CHUNK_NUMEL
from remat_offload.optimizer.private_copy import narrowed, shallow_copy, step_tensor
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
    narrow: torch.dtype | None,
) -> UpdateCost:
    """Measure a step of one tensor with a group's settings; the optimizer is not changed.

    Args:
        optimizer: the user's.
        group: one of its groups.
        dtype: of the tensor that is stepped.
        device: where it is stepped.
        shape: its shape; flat tensors are stepped in the chunks of a large parameter.
        narrow: dtype of the parameter and its gradient if the stepped tensor is their master. Widening the
            gradient and rounding the master take as long as the step itself.
    """
    data = torch.zeros(tuple(shape), dtype=dtype, device=device)
    grad = torch.ones(tuple(shape), dtype=dtype, device=device)
    settings = narrowed(group, {})
    # Steps of large parameters may draw where profiled ones did not.
    with as_current(device), generators_kept(device), torch.no_grad():
        state = step_tensor(optimizer, settings, data, grad, None)  # creates its states
        workspace = allocator_peak(partial(step_tensor, optimizer, settings, data, grad, state), device)
        take = _whole_step(optimizer, settings, data, grad, state or {}, narrow)
        seconds = _wall_s if device.type == "cpu" else partial(_device_s, DeviceTimer.of(device))
        take()
        best_s = min(seconds(take) for _ in range(5))
    return UpdateCost(
        s_per_element=best_s / max(1, data.numel()),
        workspace_nbytes_per_element=max(0, workspace.peak_nbytes) / max(1, data.numel()),
    )


def _whole_step(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    data: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    narrow: torch.dtype | None,
) -> Callable[[], None]:
    """Return a function that steps a parameter as an update does: by chunks, from a master if `narrow`."""
    parameter = torch.nn.Parameter(data)
    replica = shallow_copy(optimizer, [{**settings, "params": [parameter]}])
    replica.state[parameter] = state
    shaped = {n: s for n, s in state.items() if isinstance(s, Tensor) and s.shape == data.shape and s.ndim}
    given = (data, grad) if narrow is None else (data.to(narrow), grad.to(narrow))
    chunks: list[Any] = [...]
    if data.ndim == 1:
        chunks = [slice(start, start + CHUNK_NUMEL) for start in range(0, len(data), CHUNK_NUMEL)]

    def take() -> None:
        step = ChunkedStep(replica, parameter, settings, tuple(shaped), shaped.__getitem__, data.numel())
        for chunk in chunks:
            states = {name: value[chunk] for name, value in shaped.items()}
            step.step(given[0][chunk], given[1][chunk], states, master=data[chunk] if narrow else None)
        step.finish()

    return take


def _device_s(timer: DeviceTimer, function: Callable[[], object]) -> float:
    return timer.seconds(function).run_s


def _wall_s(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
