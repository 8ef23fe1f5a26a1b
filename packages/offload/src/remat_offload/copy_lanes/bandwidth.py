"""Measure the bandwidth of a machine's copies, and of an optimizer step that runs during copies."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import attrs
import torch

from remat_graph import Lane, Links
from remat_offload.copy_lanes.machine import Machine
from remat_offload.host_memory.pool import HostPool

_COPIES = 8
_LONG_S = 4e-3  # in a copy of this duration the time to begin it is negligible
_UPDATE_NBYTES = 28  # for each element that AdamW steps: four floats read, three written
_POLL_S = 1e-4
_REPEATS = 3
_FEW = 512  # bytes: too few to take time
_STARTS = 32
_SLOWDOWN = 0.02  # of the optimizer's speed: less is noise


def measure_links(
    machine: Machine,
    pool: HostPool,
    nbytes: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Links:
    """Measure copies in each direction alone, in both, and in both during an optimizer step on the CPU.

    The optimizer is a fused AdamW over fp32 values. `Links` assumes that copies have their own speed, and
    that the optimizer gets the rest of the host's bandwidth; so what copies lose is charged to the optimizer.

    Args:
        machine: the machine; its lanes are idle.
        pool: allocates two blocks on the host, each at most a quarter of its capacity.
        nbytes: the most bytes of a block, and of the values that are stepped; slow links are measured with
            less. None: 64 MiB, or 4 MiB if the device is the host itself.
        clock: returns seconds, from any starting point.
        sleep: waits for a number of seconds of the clock.
    """
    if nbytes is None:
        nbytes = 1 << (22 if machine.device.type == "cpu" else 26)
    nbytes = max(4, min(nbytes, pool.statistics.capacity_nbytes // 4))
    host = {lane: pool.allocate(nbytes) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
    device = {lane: machine.allocate((nbytes,), (1,), torch.uint8) for lane in host}
    blocks = _Blocks(machine, host, device, clock, sleep)
    blocks.choose_nbytes()
    alone: dict[Lane, float] = {}
    for lane in host:
        alone |= blocks.copy({lane: _COPIES})
    share = _COPIES / min(alone.values())
    copied = blocks.copy({lane: round(bandwidth * share) for lane, bandwidth in alone.items()})
    both = {lane: min(alone[lane], copied[lane]) for lane in host}
    host_nbytes_per_s = _host_bandwidth(blocks, both, numel=nbytes // 4)
    start_s = 0.0 if machine.device.type == "cpu" else blocks.start_s()  # a host that computes waits anyway
    for lane, block in host.items():
        pool.release(block)
        machine.release(device[lane])
    return Links(
        to_host_nbytes_per_s=alone[Lane.TO_HOST],
        to_device_nbytes_per_s=alone[Lane.TO_DEVICE],
        to_host_duplex_nbytes_per_s=both[Lane.TO_HOST],
        to_device_duplex_nbytes_per_s=both[Lane.TO_DEVICE],
        host_nbytes_per_s=host_nbytes_per_s,
        start_s=start_s,
    )


@attrs.define
class _Blocks:
    """A block on the host and one on the device for each direction; a copy moves `nbytes`."""

    machine: Machine
    host: dict[Lane, torch.Tensor]
    device: dict[Lane, torch.Tensor]
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    nbytes: int = 0

    def choose_nbytes(self) -> None:
        """Find a size of copies whose duration is long compared with their start; touch the pages."""
        whole = next(iter(self.host.values())).numel()
        one = dict.fromkeys(self.host, 1)
        self.nbytes = min(whole, 1 << 16)
        # Twice, since other processes can only make copies slower.
        while self.nbytes < whole and self.nbytes / max(min(self.copy(one).values()) for _ in "12") < _LONG_S:
            self.nbytes = min(whole, 4 * self.nbytes)
        self.copy(one)

    def start_s(self) -> float:
        """Return the seconds of the calling thread for a copy into new memory and the wait for it."""
        taken_s = []
        host = self.host[Lane.TO_DEVICE][:_FEW]
        for _ in range(_STARTS):
            began_s = self.clock()
            there = self.machine.allocate((_FEW,), (1,), torch.uint8)
            ticket = self.machine.copy(Lane.TO_DEVICE, there, host)
            self.machine.wait_on_compute(ticket)
            taken_s.append(self.clock() - began_s)
            ticket.synchronize()  # the pool may give the block back after this
            self.machine.release(there)
        return statistics.median(taken_s)

    def copy(self, copies: Mapping[Lane, int], meanwhile: Callable[[], object] = int) -> dict[Lane, float]:
        """Return the bytes per second of each lane, all of its copies begun before `meanwhile`."""
        began_s = self.clock()
        last = {}
        for turn in range(max(copies.values())):
            for lane in (lane for lane, count in copies.items() if turn < count):
                host, device = self.host[lane][: self.nbytes], self.device[lane][: self.nbytes]
                to, of = (host, device) if lane is Lane.TO_HOST else (device, host)
                last[lane] = self.machine.copy(lane, to, of)
        meanwhile()
        bandwidths: dict[Lane, float] = {}
        while len(bandwidths) < len(copies):
            for lane in copies.keys() - bandwidths.keys():
                if last[lane].query():
                    last[lane].synchronize()  # raises if the copy failed
                    bandwidths[lane] = copies[lane] * self.nbytes / (self.clock() - began_s)
            self.sleep(_POLL_S)
        return bandwidths


def _host_bandwidth(blocks: _Blocks, bandwidths: Mapping[Lane, float], numel: int) -> float | None:
    """Return the host's bandwidth for copies and the optimizer together; None if they do not slow each other.

    `bandwidths` are those of both directions at once; the optimizer steps `numel` elements.
    """
    param = torch.nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()  # creates its states
    taken_s: list[float] = []

    def step() -> None:
        began_s = blocks.clock()
        blocks.machine.work(optimizer.step).synchronize()
        taken_s.append(blocks.clock() - began_s)

    for _ in range(_REPEATS):
        step()
    alone_s = min(taken_s)
    copies = {
        lane: 1 + math.ceil(2 * alone_s * bandwidth / blocks.nbytes) for lane, bandwidth in bandwidths.items()
    }
    speeds = []
    for _ in range(_REPEATS):
        reached = blocks.copy(copies, meanwhile=step)
        lost_nbytes = sum(
            count * blocks.nbytes * max(0.0, bandwidths[lane] / reached[lane] - 1.0)
            for lane, count in copies.items()
        )
        lost_s = lost_nbytes * alone_s / (_UPDATE_NBYTES * numel)
        speeds.append((alone_s - lost_s) / taken_s[-1])
    speed = sorted(speeds)[_REPEATS // 2]
    if speed > 1.0 - _SLOWDOWN:
        return None
    by_itself = _UPDATE_NBYTES * numel / alone_s
    return max(by_itself, sum(bandwidths.values()) / (1.0 - speed))
