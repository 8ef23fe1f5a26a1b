"""What the table calls wrong is called wrong: scenarios with planted mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.integrations.judge import row_of
from benchmarks.integrations.plain_loops import steps_of
from benchmarks.integrations.scenario import Run, Scenario
from benchmarks.integrations.tiny import batches, llama


def other_numbers(run: Run) -> None:
    """The planned training takes another step size."""
    model = run.limited(llama().train())
    steps_of(run, model, batches(2), torch.optim.SGD(model.parameters(), lr=0.2 if run.planned else 0.1))


def past_the_model(run: Run) -> None:
    """Half of the calls go around the planned model."""
    model = run.limited(llama().train())
    for step, batch in enumerate(batches(2)):
        if run.planned and step:
            batch = dict(batch)
            labels = batch.pop("labels")
            logits = model.lm_head(model.model(**batch).last_hidden_state)
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        else:
            model(**batch).loss.backward()
        run.losses.append(0.0)


def above_the_budget(run: Run) -> None:
    """A tensor lives during the whole step that no plan counts."""
    model = run.limited(llama().train())
    loss = model(**batches(1)[0]).loss
    much = torch.zeros(1 << 20)
    loss.backward()
    run.losses.append(loss.item() + much[0].item())


def another_plan(run: Run) -> None:
    """Two shapes, where one was expected."""
    model = run.limited(llama().train())
    for batch in (batches(1)[0], batches(1, size=2)[0]):
        loss = model(**batch).loss
        loss.backward()
        run.losses.append(loss.item())


def broken_checkpoint(run: Run) -> None:
    """What was saved is not what was trained."""
    steps_of(run, run.limited(llama().train()), batches(1))
    run.checks["weights of the checkpoint"] = not run.planned


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (other_numbers, "differ: "),
        (past_the_model, "planned 1 of 2 calls"),
        (above_the_budget, "planned step 0 took "),
        (another_plan, "2 plans instead of 1"),
        (another_plan, "warned: called in another way"),
        (broken_checkpoint, "weights of the checkpoint"),
    ],
)
def test_a_mistake_is_found(mistake: object, found: str, tmp_path: Path) -> None:
    """Each by its own words."""
    row = row_of(Scenario(tool="planted", feature=found, run=mistake), tmp_path)
    assert any(found in wrong for wrong in row["wrong"]), row["wrong"]


@pytest.mark.filterwarnings("ignore")
def test_an_expected_warning_must_come(tmp_path: Path) -> None:
    """A row that names a warning is wrong without it."""

    def silent(run: Run) -> None:
        steps_of(run, run.limited(llama().train()), batches(1))

    scenario = Scenario(tool="planted", feature="silent", run=silent, warns=("torch.compile",))
    assert row_of(scenario, tmp_path)["wrong"] == ["no warning with 'torch.compile'"]
