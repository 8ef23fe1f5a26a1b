"""Write the plan of a model to the TensorBoard run of transformers' `Trainer`.

The callbacks of a `Trainer` do not see each other, so what is known of its TensorBoard callback is where it
puts its files: into a new folder of ``output_dir/runs``, or of ``TENSORBOARD_LOGGING_DIR``.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OWN = "remat"


def write_plan(args: Any, text: str, figures: Mapping[str, float], step: int) -> None:
    """Write a plan next to the latest run.

    It has a folder of its own, because TensorBoard reads a folder's files one after the other: while a run
    goes on, it would not come back to the file of the trainer.

    Args:
        args: a `transformers.TrainingArguments`.
        text: the plan in words.
        figures: its figures by name.
        step: the number of the training step.
    """
    with _writer_class()(str(latest_run(args) / _OWN)) as writer:
        writer.add_text("remat/plan", text, step)
        for name, value in figures.items():
            writer.add_scalar(name, value, step)


def latest_run(args: Any) -> Path:
    """The folder with the newest events; where there are none yet, the folder of all runs."""
    named = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    runs = Path(named).expanduser() if named else Path(args.output_dir, "runs")
    events = [path for path in runs.rglob("events.out.tfevents.*") if path.parent.name != _OWN]
    return max(events, key=lambda path: path.stat().st_mtime_ns).parent if events else runs


def _writer_class() -> Any:
    """A `SummaryWriter`, of tensorboardX if tensorboard is not installed, as in transformers."""
    try:
        # Imported here, because it needs a package of its own.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        from tensorboardX import SummaryWriter  # type: ignore[no-redef]
    return SummaryWriter
