"""What the device and the host hold stays within both budgets, step after step, and does not grow."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from remat_executor import MemoryMeter
from remat_facade import NoRoom
from remat_graph import BadBudget
from remat_offload import SimulatedMachine
from tests.helpers.offmates import kept_on_device, moving_run, offmate


@pytest.mark.parametrize(
    ("name", "budget", "in_backward", "accumulation"),
    [("llama", "35%", False, 2), ("llama", "60%", True, 2), ("convolutions", "60%", False, 1)],
)
def test_both_budgets_are_kept(name: str, budget: str, in_backward: bool, accumulation: int) -> None:
    """By a meter of every storage on the device, and by what the host was asked for."""
    host_nbytes = 4 << 20
    run = moving_run(
        name,
        budget,
        machine=SimulatedMachine(),
        in_backward=in_backward,
        accumulation=accumulation,
        steps=40,
        host_nbytes=host_nbytes,
    )
    module, readings = run.model, []
    for _ in range(40):
        module.synchronize()
        with MemoryMeter(kept_on_device(run), device="cpu") as meter:
            run.train(1)
            module.synchronize()
        readings.append(meter.baseline_nbytes + meter.peak_nbytes)
    # The plan has what buffers and inputs leave of the budget; one input may be given twice.
    inputs = {tensor.data_ptr(): tensor.nbytes for tensor in run.batches(0).values()}
    outside_nbytes = sum(b.nbytes for b in module.module.buffers()) + sum(inputs.values())
    assert max(readings) <= module.plan.budget_nbytes + outside_nbytes
    assert run.memory.peak_nbytes <= host_nbytes
    assert len(set(readings[2:])) == 1, "what a step takes changes"
    assert module.host.peak_nbytes <= module.plan.host_peak_nbytes <= host_nbytes


def test_a_shortage_in_a_copy_says_what_the_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in an operator does; the next step is right."""
    run = moving_run("llama", "60%", machine=SimulatedMachine(), in_backward=True, accumulation=1, steps=3)
    machine = run.model._remat_training.engine.residency.machine

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(machine, "allocate", full)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.train(1)
    assert "the plan needs" in caught.value.__notes__[0]


class Mean(nn.Module):
    """A step that takes little beside its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean(1)).square().mean()


@pytest.mark.parametrize("budget", ["20KiB", "150%"])
def test_inputs_of_a_later_call_are_taken_off_the_budget(budget: str) -> None:
    """A percentage is of the sample's step; what has no room is refused, and training goes on."""
    model = Mean()
    module = offmate(model, (torch.ones(8, 2, 32),), budget, optimizer=SGD(model.parameters(), lr=0.1))
    with pytest.raises((NoRoom, BadBudget)):
        module(torch.ones(8, 200, 32))
    module(torch.ones(8, 2, 32)).backward()
    module.optimizer.step()
    plain = Mean()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(torch.ones(8, 2, 32)), plain(torch.ones(8, 2, 32)))
