"""What the device and the host hold stays within both budgets, step after step, and does not grow."""

import pytest

from remat_executor.meter import MemoryMeter
from remat_offload import HostPool, SimulatedMachine
from tests.offmates import MODELS, OPTIMIZERS, Mapped, Run, kept_on_device, offmate


@pytest.mark.parametrize(
    ("name", "budget", "in_backward", "accumulation"),
    [("llama", "35%", False, 2), ("llama", "60%", True, 2), ("convolutions", "60%", False, 1)],
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
        accumulation=accumulation,
        machine=SimulatedMachine(),
        pool=HostPool(host_nbytes, memory=memory),
    )
    run = Run(
        module,
        optimizer,
        batches,
        accumulation=accumulation,
        in_backward=in_backward,
        steps=40,
        memory=memory,
    )
    readings = []
    for _ in range(40):
        module.synchronize()
        with MemoryMeter(kept_on_device(run), device="cpu") as meter:
            run.train(1)
            module.synchronize()
        readings.append(meter.baseline_nbytes + meter.peak_nbytes)
    assert max(readings) <= module.plan.budget_nbytes + sum(b.nbytes for b in model.buffers())
    assert memory.peak_nbytes <= host_nbytes
    assert len(set(readings[2:])) == 1, "what a step takes changes"
    assert module.host.peak_nbytes <= module.plan.host_peak_nbytes <= host_nbytes
