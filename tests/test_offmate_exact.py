"""A model trained by `Offmate` has the bits of one trained plainly: losses, parameters, buffers, states."""

import pytest

from tests.offmates import MODELS, OPTIMIZERS, Run, differences, offmate

# What the whole of training holds is 100 %; the smallest budgets are near the least that a plan takes.
CASES = [
    ("llama", "adamw", "100%", False, 1),
    ("llama", "adamw", "35%", False, 4),
    ("llama", "sgd", "45%", True, 1),
    ("convolutions", "sgd", "60%", False, 4),
    ("convolutions", "adamw", "60%", True, 1),
]


@pytest.mark.parametrize(("name", "kind", "budget", "in_backward", "accumulation"), CASES)
def test_the_bits_of_plain_training(name, kind, budget, in_backward, accumulation):
    """Dropout, tied weights, clipping, accumulation, a cosine schedule; both styles of stepping."""
    make, batches = MODELS[name]
    runs = []
    for ours in (False, True):
        model = make()
        optimizer = OPTIMIZERS[kind](model.parameters())
        called = model
        if ours:
            called = offmate(
                model, batches(0), budget, optimizer=optimizer, optimizer_in_backward=in_backward
            )
            assert called.optimizer is optimizer
        run = Run(called, optimizer, batches, accumulation=accumulation, in_backward=in_backward)
        runs.append(run.train(4))
    assert [] == differences(*runs)
    assert called.runs["planned"] == 4 * accumulation
    assert (budget != "100%") == (called.plan.host_peak_nbytes > 0)
