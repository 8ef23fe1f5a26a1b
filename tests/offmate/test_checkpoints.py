"""State dicts at any moment between steps are those of plain training, and training goes on from them."""

import copy
import io
from typing import Any

import pytest
import torch

from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate


def started(name: str, kind: str, *, ours: bool) -> Run:
    """A run that has not begun."""
    make, batches = MODELS[name]
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    budget = "45%" if name == "llama" else "60%"
    called = offmate(model, batches(0), budget, optimizer=optimizer) if ours else model
    return Run(called, optimizer, batches)


def saved(run: Run) -> dict[str, Any]:
    """What a user writes to disk, through the same calls."""
    file = io.BytesIO()
    parts = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": run.step}, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("name", "kind"), [("llama", "adamw"), ("convolutions", "sgd")])
def test_stopped_and_resumed(name: str, kind: str) -> None:
    """Saved by either, after the step and before anything waits for it; loaded by the other."""
    plain, ours = started(name, kind, ours=False), started(name, kind, ours=True)
    assert [] == differences(plain, ours)  # before the first step there are no states
    for run in (plain, ours):
        run.train(3)
    files = [saved(plain), saved(ours)]
    assert [] == differences(plain, ours)
    again = started(name, kind, ours=True)
    for run, file in ((plain, files[1]), (again, files[0])):
        run.model.load_state_dict(file["model"])
        run.optimizer.load_state_dict(file["optimizer"])
        run.scheduler.load_state_dict(file["scheduler"])
        run.step = file["step"]
        run.losses.clear()
        run.train(3)
    assert [] == differences(plain, again)


@pytest.mark.parametrize("order", [1, -1])
def test_masters_are_what_was_saved(order: int) -> None:
    """Loaded where they were saved, the model first or the optimizer: the next step is the same again."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(4)]).bfloat16(), torch.ones(8, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ours = offmate(model, x.bfloat16(), "50%", optimizer=optimizer, master_weights=True)

    def masters() -> Any:
        ours(x.bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [state["master"].clone() for state in optimizer.state_dict()["state"].values()]

    masters()
    files = [(part, copy.deepcopy(part.state_dict())) for part in (ours, optimizer)]
    expected = masters()
    for part, file in files[::order]:
        part.load_state_dict(file)
    assert all(torch.equal(a, b) for a, b in zip(expected, masters(), strict=True))


def test_no_device_is_needed_for_a_state_dict() -> None:
    """What is saved lies on the CPU, in memory that can be read without the module."""
    run = started("llama", "adamw", ours=True).train(1)
    tensors = [*run.model.state_dict().values()]
    tensors += [t for s in run.optimizer.state_dict()["state"].values() for t in s.values()]
    assert {"cpu"} == {t.device.type for t in tensors if isinstance(t, torch.Tensor)}


def test_a_parameter_that_is_read_is_up_to_date() -> None:
    """Held from before, read right after the step: the reader waits for the update, and for no other."""
    plain, ours = (started("llama", "adamw", ours=side) for side in (False, True))
    held = [list(plain.model.parameters()), list(ours.model.module.parameters())]
    averages = []
    for run, parameters in zip((plain, ours), held, strict=True):
        run.train(2)
        averages.append([p.detach().clone().mul_(0.5).add_(1.0) for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))
    assert {torch.nn.Parameter} == set(map(type, held[1]))


def test_evaluation_without_gradients() -> None:
    """`eval()` and `no_grad` give what the plain model gives."""
    plain, ours = (started("convolutions", "adamw", ours=side).train(2) for side in (False, True))
    losses = []
    for run in (plain, ours):
        run.model.eval()
        with torch.no_grad():
            losses.append(run.model(**run.batches(7)))
        run.model.train()
        run.train(1)
    assert torch.equal(*losses)
    assert [] == differences(plain, ours)
