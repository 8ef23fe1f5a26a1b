"""PyTorch-Ignite's supervised trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Blocks, pictures, tool

TOOL = "ignite"


def train(run: Run, model: nn.Module, **options: Any) -> nn.Module:
    """Four steps by `create_supervised_trainer`."""
    engine, handlers = tool("ignite.engine"), tool("ignite.handlers")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    trainer = engine.create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, device="cpu", **options
    )
    evaluator = engine.create_supervised_evaluator(
        model, metrics={"loss": tool("ignite.metrics").Loss(nn.functional.cross_entropy)}
    )
    data = pictures(4)

    @trainer.on(engine.Events.ITERATION_COMPLETED)
    def keep(engine: Any) -> None:
        run.losses.append(engine.state.output)

    @trainer.on(engine.Events.ITERATION_COMPLETED(every=2))
    def evaluate(_: Any) -> None:
        run.losses.append(evaluator.run(data).metrics["loss"])

    handlers.EMAHandler(model, momentum=0.1).attach(trainer)
    trainer.run(data, max_epochs=1)
    run.keep(model)
    return model


@scenario(TOOL, "create_supervised_trainer, evaluator, EMAHandler")
def plain(run: Run) -> None:
    train(run, run.limited(Blocks(), reserve_nbytes=4096))


@scenario(TOOL, "gradient_accumulation_steps")
def accumulation(run: Run) -> None:
    train(run, run.limited(Blocks(), reserve_nbytes=4096), gradient_accumulation_steps=2)


@scenario(TOOL, "Checkpoint, loaded")
def saved(run: Run) -> None:
    handlers = tool("ignite.handlers")
    model = train(run, run.limited(Blocks(), reserve_nbytes=4096))
    saver = handlers.DiskSaver(str(run.folder / "saved"), create_dir=True)
    handlers.Checkpoint({"model": model}, saver)(tool("ignite.engine").Engine(lambda *_: None))
    (file,) = (run.folder / "saved").iterdir()
    loaded = Blocks()
    loaded.load_state_dict(torch.load(file))
    run.check_equal("weights of the checkpoint", loaded.state_dict(), model.state_dict())
