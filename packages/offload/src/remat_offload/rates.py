"""How fast a machine copies, and how fast an optimizer steps on it: measured."""

import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

from remat_executor.allocator import allocator_peak
from remat_graph import Lane, Links
from remat_offload.lanes import Machine
from remat_offload.pool import HostPool
from remat_offload.shadow import narrowed, step_tensor

_COPIES = 4


def measure_links(machine: Machine, pool: HostPool, nbytes: int = 1 << 24) -> Links:
    """Copy blocks away and back, alone and both at once.

    Args:
        machine: what copies.
        pool: lends the host's blocks, two of them.
        nbytes: of a block.
    """
    blocks = {lane: pool.allocate(nbytes) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
    there = {lane: machine.allocate((nbytes,), (1,), torch.uint8) for lane in blocks}

    def seconds(lanes: tuple[Lane, ...]) -> dict[Lane, float]:
        for lane in lanes:
            _copy(machine, lane, there[lane], blocks[lane]).synchronize()
        began_s = time.perf_counter()
        last = {}
        for _ in range(_COPIES):
            for lane in lanes:
                last[lane] = _copy(machine, lane, there[lane], blocks[lane])
        spent_s = {}
        for lane in lanes:
            last[lane].synchronize()
            spent_s[lane] = max(time.perf_counter() - began_s, 1e-9)
        return spent_s

    alone = {lane: seconds((lane,))[lane] for lane in blocks}
    both = seconds((Lane.TO_HOST, Lane.TO_DEVICE))
    for lane, block in blocks.items():
        pool.release(block)
        machine.discard(there[lane])
    moved = _COPIES * nbytes
    return Links(
        to_host_nbytes_per_s=moved / alone[Lane.TO_HOST],
        to_device_nbytes_per_s=moved / alone[Lane.TO_DEVICE],
        to_host_duplex_nbytes_per_s=moved / max(both[Lane.TO_HOST], alone[Lane.TO_HOST]),
        to_device_duplex_nbytes_per_s=moved / max(both[Lane.TO_DEVICE], alone[Lane.TO_DEVICE]),
    )


def _copy(machine: Machine, lane: Lane, device: torch.Tensor, host: torch.Tensor) -> Any:
    destination, source = (host, device) if lane is Lane.TO_HOST else (device, host)
    return machine.copy(lane, destination, source)


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
    numel: int,
) -> UpdateCost:
    """What the optimizer takes on a device, with the kernels that its user chose.

    Args:
        optimizer: the user's; not changed.
        group: one of its groups: its settings count.
        dtype: of parameter and gradient.
        device: where it steps.
        numel: elements that are stepped to find out.
    """
    data = torch.zeros(numel, dtype=dtype, device=device)
    grad = torch.ones(numel, dtype=dtype, device=device)
    settings, state = narrowed(group, {}), None
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        state = step_tensor(optimizer, settings, data, grad, state)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    scratch = allocator_peak(lambda: step_tensor(optimizer, settings, data, grad, state), device)
    return UpdateCost(
        s_per_element=best_s / numel, scratch_nbytes_per_element=max(0, scratch.peak_nbytes) / numel
    )
