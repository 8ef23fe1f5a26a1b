"""What the device and the host hold stays within both budgets, step after step, and does not grow."""

import mmap
from collections.abc import Iterator

import attrs
import pytest
import torch

from remat_executor.meter import MemoryMeter
from remat_offload import HostPool, SimulatedMachine
from tests.offmates import MODELS, OPTIMIZERS, Run, offmate


@attrs.define
class Mapped:
    """Host memory that the meter of the device, which is the CPU here, does not see; it counts by itself."""

    now_nbytes: int = 0
    peak_nbytes: int = 0
    addresses: set[int] = attrs.field(factory=set)

    def charge(self, nbytes: int) -> int:
        """Exactly what was asked."""
        return nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Pages of the system's."""
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.addresses.add(block.data_ptr())
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """They go with the last reference."""
        self.now_nbytes -= block.numel()


def on_device(run: Run, host: set[int]) -> Iterator[torch.Tensor]:
    """What persists and is not on the host; counts of steps are no larger than a number."""
    for parameter in run.model.module.parameters():
        states = run.optimizer.state.get(parameter, {}).values()
        kept = [t for t in states if isinstance(t, torch.Tensor) and t.dim()]
        yield from (t for t in (parameter.data, *kept) if t.untyped_storage().data_ptr() not in host)


@pytest.mark.parametrize(
    ("name", "budget", "in_backward", "accumulation"),
    [("llama", "35%", False, 2), ("llama", "60%", True, 1), ("convolutions", "60%", False, 1)],
)
def test_both_budgets_are_kept(name, budget, in_backward, accumulation):
    """By a meter of every storage on the device, and by what the host was asked for."""
    make, batches = MODELS[name]
    model, memory, host_nbytes = make(), Mapped(), 4 << 20
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    module = offmate(
        model,
        batches(0),
        budget,
        optimizer=optimizer,
        optimizer_in_backward=in_backward,
        machine=SimulatedMachine(),
        pool=HostPool(host_nbytes, memory=memory),
    )
    run = Run(module, optimizer, batches, accumulation=accumulation, in_backward=in_backward, steps=40)
    readings = []
    for _ in range(40):
        module.synchronize()
        kept = [*on_device(run, memory.addresses), *model.buffers()]
        with MemoryMeter(kept, device="cpu") as meter:
            run.train(1)
            module.synchronize()
        readings.append(meter.baseline_nbytes + meter.peak_nbytes)
    assert max(readings) <= module.plan.budget_nbytes + sum(b.nbytes for b in model.buffers())
    assert memory.peak_nbytes <= host_nbytes
    assert len(set(readings[2:])) == 1, "what a step takes changes"
    assert module.host.peak_nbytes <= module.plan.host_peak_nbytes <= host_nbytes
