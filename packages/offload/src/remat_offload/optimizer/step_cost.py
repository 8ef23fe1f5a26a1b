"""Measure the cost of an optimizer's step.

A step takes time for each element, and the host needs time for each parameter however small it is: Python,
and the launches of kernels. On a CPU both are one time. A device that has nothing else to do waits for the
host.

An update on the CPU finds its tensors in no cache, because those of all other parameters have gone through
the caches since the last one, and it shares the CPU with all else. So it is measured on several copies by
turns, in memory like that of the updates, and its time is the median. On a device it is the least time.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from remat_executor import allocator_peak
from remat_executor.costs.device_timer import DeviceTimer, Seconds
from remat_executor.current_device import as_current
from remat_offload.optimizer.chunked_step import ChunkedStep
from remat_offload.optimizer.chunking import CHUNK_NUMEL
from remat_offload.optimizer.private_copy import State, narrowed, shallow_copy, state_like, step_tensor
from remat_offload.optimizer.trial_steps import generators_kept

_COLD_NBYTES = 1 << 30  # of all copies: more than caches hold
_MOST_COPIES = 8  # of one parameter: a small model fits in a cache
_RUNS = 5  # at least, of those that count
_FEW = 2  # elements along each dimension: too few to take time

HostBytes = Callable[[int], Tensor]
"""From a number of bytes to a tensor of them on the host, in one dimension."""


def ordinary(nbytes: int) -> Tensor:
    """Bytes of PyTorch's CPU allocator."""
    return torch.empty(nbytes, dtype=torch.uint8)


@attrs.frozen(kw_only=True)
class UpdateCost:
    """The cost of an optimizer's step on a device.

    Attributes:
        s_per_element: for each element of a parameter, without the time in which the host issues the step.
        issue_s: seconds of the host for the step of one parameter.
        workspace_nbytes_per_element: what the step allocates beyond the states, for each element.
    """

    s_per_element: float
    issue_s: float
    workspace_nbytes_per_element: float

    def alone_s(self, numel: int) -> float:
        """Seconds of the step of one parameter where nothing runs meanwhile that its issue could hide in."""
        return max(self.issue_s, self.s_per_element * numel)


def update_cost(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
    narrow: torch.dtype | None,
    host_memory: HostBytes = ordinary,
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
        host_memory: bytes of the kind that updates on the CPU work in.
    """
    measure = partial(_measured, optimizer, group, dtype, device, narrow, host_memory)
    # Steps of large parameters may draw where profiled ones did not.
    with as_current(device), generators_kept(device), torch.no_grad():
        seconds, workspace_nbytes = measure(tuple(shape))
        few, _ = measure(tuple(min(size, _FEW) for size in shape))
    numel = max(1, math.prod(shape))
    return UpdateCost(
        s_per_element=seconds.run_s / numel,
        issue_s=few.issue_s,
        workspace_nbytes_per_element=max(0, workspace_nbytes) / numel,
    )


def _measured(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    narrow: torch.dtype | None,
    host_memory: HostBytes,
    shape: tuple[int, ...],
) -> tuple[Seconds, int]:
    """The seconds of a step of one tensor, and what a step allocates."""
    settings = narrowed(group, {})
    data = torch.zeros(shape, dtype=dtype, device=device)
    grad = torch.ones(shape, dtype=dtype, device=device)
    state = _first_state(optimizer, group, data, grad)
    workspace = allocator_peak(partial(step_tensor, optimizer, settings, data, grad, state), device)
    whole = partial(_whole_step, optimizer, settings)
    given = (data, grad) if narrow is None else (data.to(narrow), grad.to(narrow))
    master = None if narrow is None else data
    if device.type != "cpu":
        take = whole(*given, state or {}, master)
        take()
        taken = [DeviceTimer.of(device).seconds(take) for _ in range(_RUNS)]
        least = Seconds(min(one.run_s for one in taken), min(one.issue_s for one in taken))
        return least, workspace.peak_nbytes
    tensors = (*given, master, *(state or {}).values())
    nbytes = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    copies = min(_MOST_COPIES, max(1, math.ceil(_COLD_NBYTES / max(1, nbytes))))
    copied = partial(_copied, host_memory)
    takes = [
        whole(copied(given[0]), copied(given[1]), copied(state or {}), copied(master)) for _ in range(copies)
    ]
    for take in takes:
        take()
    rounds = math.ceil(_RUNS / copies)
    median_s = statistics.median(_wall_s(take) for _ in range(rounds) for take in takes)
    return Seconds(median_s, median_s), workspace.peak_nbytes


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], data: Tensor, grad: Tensor) -> State | None:
    """Step a tensor for the first time; return its state.

    A class that creates states in its constructor alone fails on a new tensor. It then gets a state like that
    of the group's largest parameter, since a scalar and a counter have the same shape.
    """
    step = partial(step_tensor, optimizer, narrowed(group, {}), data, grad)
    try:
        return step(None)
    except Exception:
        largest = max(group["params"], key=torch.Tensor.numel)
        if not optimizer.state.get(largest):
            raise
        return step(state_like(optimizer.state[largest], largest.shape, data))


def _copied(host_memory: HostBytes, value: Any) -> Any:
    """A copy of a parameter's tensor or state, with its elements in memory of a kind."""
    if isinstance(value, Mapping):
        return {name: _copied(host_memory, each) for name, each in value.items()}
    if not isinstance(value, Tensor) or not value.ndim or value.layout is not torch.strided:
        return copy.deepcopy(value)
    return host_memory(value.nbytes).view(value.dtype).view(value.shape).copy_(value)


def _whole_step(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    data: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    master: Tensor | None,
) -> Callable[[], None]:
    """Return a function that steps a parameter as an update does: by chunks, from a master if it has one."""
    parameter = torch.nn.Parameter(data if master is None else master)
    replica = shallow_copy(optimizer, [{**settings, "params": [parameter]}])
    replica.state[parameter] = state
    shaped = {n: s for n, s in state.items() if isinstance(s, Tensor) and s.shape == data.shape and s.ndim}
    chunks: list[Any] = [...]
    if data.ndim == 1:
        chunks = [slice(start, start + CHUNK_NUMEL) for start in range(0, len(data), CHUNK_NUMEL)]

    def take() -> None:
        step = ChunkedStep(replica, parameter, settings, tuple(shaped), shaped.__getitem__, data.numel())
        for chunk in chunks:
            states = {name: value[chunk] for name, value in shaped.items()}
            step.step(data[chunk], grad[chunk], states, master=None if master is None else master[chunk])
        step.finish()

    return take


def _wall_s(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
