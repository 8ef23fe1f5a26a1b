"""fastai's `Learner`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Blocks, pictures, tool

TOOL = "fastai"


def learn(run: Run, model: nn.Module, **options: Any) -> Any:
    """One epoch of four steps with `fit`, and its validation."""
    tool("fastai.callback.progress")  # adds `no_bar`
    learner_of, data_of = tool("fastai.learner"), tool("fastai.data.core")
    loaders = data_of.DataLoaders(pictures(4), pictures(2), device=torch.device("cpu"))
    learner = learner_of.Learner(
        loaders, model, loss_func=nn.CrossEntropyLoss(), path=run.folder, model_dir="models", **options
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=1e-2)
    run.losses.extend(float(loss) for loss in learner.recorder.losses)
    run.losses.extend(float(value) for value in learner.recorder.values[-1])
    run.keep(learner.model)
    return learner


@scenario(TOOL, "Learner.fit with validation")
def plain(run: Run) -> None:
    learn(run, run.limited(Blocks(), reserve_nbytes=4096))


@scenario(TOOL, "saved and loaded")
def saved(run: Run) -> None:
    learner = learn(run, run.limited(Blocks(), reserve_nbytes=4096))
    learner.save("last")
    loaded = Blocks()
    loaded.load_state_dict(torch.load(run.folder / "models" / "last.pth", weights_only=False)["model"])
    run.check_equal("weights of the checkpoint", loaded.state_dict(), learner.model.state_dict())
