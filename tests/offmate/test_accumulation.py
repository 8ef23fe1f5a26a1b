"""Micro-batches: plans are made for a number of them, and any number has the bits of plain training."""

import pytest
import torch

from remat_offload import OffloadMisuse
from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate


@pytest.mark.parametrize(
    ("name", "budget", "in_backward"),
    [("llama", "60%", True), ("llama", "45%", False), ("convolutions", "80%", True)],
)
def test_any_number_of_micro_batches(name, budget, in_backward):
    """Planned for three; in either style; more, fewer and none to add to."""
    make, batches = MODELS[name]
    runs = []
    for ours in (False, True):
        model = make()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        options = {"optimizer": optimizer, "optimizer_in_backward": in_backward, "accumulation": 3}
        called = offmate(model, batches(0), budget, **options) if ours else model
        run = Run(called, optimizer, batches, in_backward=in_backward)
        for run.accumulation in (3, 3, 1, 4, 2):
            run.train(1)
        runs.append(run)
    assert [] == differences(*runs)
    moved = called.plan.host_peak_nbytes
    assert moved > 0


def test_gradients_between_backwards_are_those_of_plain_training():
    """As `.grad`, read while they may be on their way; the forward may lie outside of the context."""
    make, batches = MODELS["convolutions"]
    plain, model = make(), make()
    ours = offmate(model, batches(0), "80%", accumulation=2)
    assert ours.optimizer_in_backward
    for step in range(2):
        for called in (plain, ours):
            torch.manual_seed(step)
            loss = called(**batches(step))
            if called is ours:
                with ours.accumulating():
                    loss.backward()
            else:
                loss.backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    with ours.accumulating():
        torch.manual_seed(2)
        loss = ours(**batches(2))
    loss.backward()  # outside: it steps
    assert all(p.grad is None for p in model.parameters())
    optimizer = torch.optim.Adam(plain.parameters())
    torch.manual_seed(2)
    plain(**batches(2)).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_without_room_for_gradients():
    """One line that says how to get it, and nothing has changed."""
    make, batches = MODELS["convolutions"]
    ours = offmate(make(), batches(0), "80%")
    with pytest.raises(OffloadMisuse, match="accumulation="), ours.accumulating():
        raise AssertionError("it began")
