"""For loops with accelerate: a plan in its trackers.

    model = limit_memory(model, "20GiB")                 # before or after the next line
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`report` is called once, after the first step.
"""

from typing import Any

from torch import nn

from remat_facade.integrations.plan_report import plan_figures, plan_text


def report(accelerator: Any, model: nn.Module, step: int | None = None) -> None:
    """Print a model's plan on the main process, and give its figures to the accelerator's trackers.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: the model with a memory limit, prepared or not. Nothing happens if nothing is planned yet.
        step: the number of the training step for the trackers.
    """
    model = accelerator.unwrap_model(model)
    text = plan_text(model)
    if text is not None:
        accelerator.print(text)
        accelerator.log(plan_figures(model), step=step)
