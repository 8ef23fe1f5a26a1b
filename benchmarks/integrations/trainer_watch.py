"""What a scenario needs of tools that make transformers' trainer, and its model, by themselves."""

from __future__ import annotations

from typing import Any

from benchmarks.integrations.scenario import Run
from tests.helpers.models import import_transformers


def watching(run: Run) -> Any:
    """A callback that counts the calls of the model, and keeps its losses and what it has learned."""

    class Watching(import_transformers().TrainerCallback):
        """Sees the model when it is ready for training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Before the first step."""
            run.watched(kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """After the last one."""
            kept = ("loss", "eval_loss")
            run.losses.extend(entry[name] for entry in state.log_history for name in kept if name in entry)
            run.keep(kwargs["model"])

    return Watching()
