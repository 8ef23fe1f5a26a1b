"""A callback for transformers' `Trainer`, and for the trainers that derive from it, such as TRL's.

    Trainer(..., callbacks=[RematCallback("20GiB")])

The model's memory is limited in place when training begins, and its step is planned at the first batch. The
plan is written to the log, to the trainer's history, and to TensorBoard or Weights & Biases if in use.
"""

import logging
import sys
from typing import Any, Unpack

from torch import nn
from transformers import TrainerCallback

from remat_facade.entrypoints.keywords import LimitKeywords
from remat_facade.entrypoints.limit_memory import limit_memory, planned
from remat_facade.integrations.plan_report import plan_figures, plan_text, warn_uncalled


class RematCallback(TrainerCallback):  # type: ignore[misc]
    """Limit the memory of the trainer's model; all arguments are those of `limit_memory`."""

    def __init__(self, budget: int | str | None = None, **options: Unpack[LimitKeywords]) -> None:
        self.budget, self.options = budget, options
        self.limited: nn.Module | None = None
        self.reported = self.warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Limit the model, unless that is done since an earlier training."""
        if self.limited is not model:
            self.limited = limit_memory(model, self.budget, **self.options)
            self.reported = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the plan after the first batch."""
        self._report(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the plan after the first batch, or that there is none."""
        self._report(args, state)
        if self.limited is not None and not self.warned:
            self.warned = warn_uncalled(self.limited)

    def _report(self, args: Any, state: Any) -> None:
        if self.reported or self.limited is None or planned(self.limited) is None:
            return
        self.reported = True
        text, figures = plan_text(self.limited) or "", plan_figures(self.limited)
        if not state.is_world_process_zero:
            return
        logging.getLogger(__name__).warning("%s", text)
        state.log_history.append({**figures, "step": state.global_step})
        if "tensorboard" in args.report_to:
            # Imported here, because it needs the package tensorboard.
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(args.logging_dir) as writer:
                writer.add_text("remat/plan", text, state.global_step)
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            run.summary.update(figures)
