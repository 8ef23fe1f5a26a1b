"""How fast a machine copies, and how fast an optimizer steps on it: measured."""

import math
import time
from collections.abc import Callable, Mapping

import attrs
import torch

from remat_graph import Lane, Links
from remat_offload.host_memory.pool import HostPool
from remat_offload.machine.base import Machine

_COPIES = 8
_LONG_S = 4e-3  # a copy that takes as long tells the link's rate, not what it takes to begin
_UPDATE_NBYTES = 28  # of an element that AdamW steps: four floats read, three written
_GLANCE_S = 1e-4
_REPEATS = 3
_SLOWED = 0.02  # of the optimizer's speed: less is noise


def measure_links(machine: Machine, pool: HostPool, nbytes: int | None = None) -> Links:
    """Copy blocks away and back, alone, both at once, and both beside an optimizer that steps on the CPU.

    The optimizer's lane is a fused AdamW over fp32 values. `Links` has copies go at their own speed, and the
    optimizer have what they leave; so what copies lose beside it is charged to the optimizer, byte for byte.

    Args:
        machine: what copies and steps; its lanes are idle.
        pool: lends the host's blocks, two of them, each at most a quarter of its capacity.
        nbytes: the most bytes of a block, and of the values that are stepped; slow links are measured with
            less. None: 64 MiB, or 4 if the device is the host itself.
    """
    if nbytes is None:
        nbytes = 1 << (22 if machine.device.type == "cpu" else 26)
    nbytes = max(4, min(nbytes, pool.statistics.capacity_nbytes // 4))
    host = {lane: pool.allocate(nbytes) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
    there = {lane: machine.allocate((nbytes,), (1,), torch.uint8) for lane in host}
    blocks = _Blocks(machine, host, there)
    blocks.fit()
    alone: dict[Lane, float] = {}
    for lane in host:
        alone |= blocks.copy({lane: _COPIES})
    share = _COPIES / min(alone.values())
    copied = blocks.copy({lane: round(rate * share) for lane, rate in alone.items()})
    both = {lane: min(alone[lane], copied[lane]) for lane in host}
    host_nbytes_per_s = _shared_rate(blocks, both, numel=nbytes // 4)
    for lane, block in host.items():
        pool.release(block)
        machine.release(there[lane])
    return Links(
        to_host_nbytes_per_s=alone[Lane.TO_HOST],
        to_device_nbytes_per_s=alone[Lane.TO_DEVICE],
        to_host_duplex_nbytes_per_s=both[Lane.TO_HOST],
        to_device_duplex_nbytes_per_s=both[Lane.TO_DEVICE],
        host_nbytes_per_s=host_nbytes_per_s,
    )


@attrs.define
class _Blocks:
    """A block on the host and one on the device for either direction.

    Attributes:
        nbytes: of a copy.
    """

    machine: Machine
    host: dict[Lane, torch.Tensor]
    there: dict[Lane, torch.Tensor]
    nbytes: int = 0

    def fit(self) -> None:
        """Find how many bytes take long beside the beginning of a copy; touch their pages."""
        whole = next(iter(self.host.values())).numel()
        one = dict.fromkeys(self.host, 1)
        self.nbytes = min(whole, 1 << 16)
        # Twice, since whatever else runs here can only add.
        while self.nbytes < whole and self.nbytes / max(min(self.copy(one).values()) for _ in "12") < _LONG_S:
            self.nbytes = min(whole, 4 * self.nbytes)
        self.copy(one)

    def copy(self, copies: Mapping[Lane, int], meanwhile: Callable[[], object] = int) -> dict[Lane, float]:
        """Bytes per second of each lane, with so many copies in each, all begun at once.

        Args:
            copies: by lane.
            meanwhile: called once they are begun.
        """
        began_s = time.perf_counter()
        last = {}
        for turn in range(max(copies.values())):
            for lane in (lane for lane, count in copies.items() if turn < count):
                host, there = self.host[lane][: self.nbytes], self.there[lane][: self.nbytes]
                to, of = (host, there) if lane is Lane.TO_HOST else (there, host)
                last[lane] = self.machine.copy(lane, to, of)
        meanwhile()
        rates: dict[Lane, float] = {}
        while len(rates) < len(copies):
            for lane in copies.keys() - rates.keys():
                if last[lane].query():
                    last[lane].synchronize()  # tells if it failed
                    rates[lane] = copies[lane] * self.nbytes / (time.perf_counter() - began_s)
            time.sleep(_GLANCE_S)
        return rates


def _shared_rate(blocks: _Blocks, rates: Mapping[Lane, float], numel: int) -> float | None:
    """What the host's memory gives to copies and the optimizer together; None if they do not disturb it.

    Args:
        blocks: to be copied.
        rates: of both directions at once.
        numel: elements that the optimizer steps.
    """
    param = torch.nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()  # makes its states
    taken_s: list[float] = []

    def step() -> None:
        began_s = time.perf_counter()
        blocks.machine.work(optimizer.step).synchronize()
        taken_s.append(time.perf_counter() - began_s)

    for _ in range(_REPEATS):
        step()
    alone_s = min(taken_s)
    copies = {lane: 1 + math.ceil(2 * alone_s * rate / blocks.nbytes) for lane, rate in rates.items()}
    speeds = []
    for _ in range(_REPEATS):
        reached = blocks.copy(copies, meanwhile=step)
        lost_nbytes = sum(
            count * blocks.nbytes * max(0.0, rates[lane] / reached[lane] - 1.0)
            for lane, count in copies.items()
        )
        lost_s = lost_nbytes * alone_s / (_UPDATE_NBYTES * numel)
        speeds.append((alone_s - lost_s) / taken_s[-1])
    speed = sorted(speeds)[_REPEATS // 2]
    if speed > 1.0 - _SLOWED:
        return None
    by_itself = _UPDATE_NBYTES * numel / alone_s
    return max(by_itself, sum(rates.values()) / (1.0 - speed))
