"""For transformers' `Trainer`, and for the trainers that derive from it, such as TRL's.

    Trainer(..., callbacks=[RematCallback("20GiB")])

The model's memory is limited in place when training begins, and its step is planned at the first batch. The
plan is written to the log, to the trainer's history, and to TensorBoard or Weights & Biases if in use.

    offmate(trainer, "20GiB", host_budget="64GiB")   # before trainer.train()

The trainer then trains its model as an `Offmate`, with its own optimizer.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from remat_executor.module.in_place import state_of
from remat_facade.entrypoints.keywords import LimitKeywords, OffmateTrainerKeywords
from remat_facade.entrypoints.limit_memory import check_limit, limit_memory, planned
from remat_facade.entrypoints.offload_options import offmate_config
from remat_facade.entrypoints.offmate import Offmate
from remat_facade.integrations.extras import from_extra
from remat_facade.integrations.named_module import check_name, module_named
from remat_facade.integrations.plan_report import plan_figures, plan_text, warn_uncalled
from remat_facade.integrations.tensorboard import write_plan
from remat_offload import OffloadMisuse
from remat_offload.optimizer.trial_steps import generators_kept

with from_extra("transformers"):
    from transformers import TrainerCallback


class RematCallback(TrainerCallback):  # type: ignore[misc]
    """Limit the memory of the trainer's model.

    Args:
        budget: as for `limit_memory`.
        module: the name of a submodule to limit instead, such as ``"model"``, where the whole model cannot be
            captured: on a GPU, TRL's fused head selects tokens by their labels.
        **options: as for `limit_memory`.
    """

    def __init__(
        self, budget: int | str | None = None, *, module: str | None = None, **options: Unpack[LimitKeywords]
    ) -> None:
        check_limit("RematCallback", budget, options)
        check_name(module)
        self.budget, self.module, self.options = budget, module, options
        self.limited: nn.Module | None = None
        self.reported = self.warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Limit the model, unless that is done since an earlier training."""
        chosen = model if self.module is None else module_named(model, self.module)
        if self.limited is not chosen:
            self.limited = limit_memory(chosen, self.budget, **self.options)
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
            write_plan(args, text, figures, state.global_step)
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            run.summary.update({**figures, "remat/plan": text})


def offmate(
    trainer: Any,
    budget: int | str,
    *,
    sample: Mapping[str, Any] | None = None,
    **options: Unpack[OffmateTrainerKeywords],
) -> Offmate:
    """Let a trainer train its model as an `Offmate`, with its own optimizer; call it before ``train()``.

    The trainer makes its optimizer as it would without this call, with its parameter groups, and steps it as
    usual: clipping, schedules, accumulation and checkpoints are unchanged.

    Args:
        trainer: a `transformers.Trainer`. If its model does not fit on the device, its arguments must be of a
            subclass of `TrainingArguments` with ``place_model_on_device = False``.
        budget: as for `Offmate`.
        sample: a batch as the trainer's loader gives it; None for the first one. Random generators stay
            unchanged, but a dataset that can be read only once loses its first batches.
        **options: as for `Offmate`; ``accumulation`` is the trainer's by default.

    Returns:
        The model that the trainer now has.

    Raises:
        OffloadMisuse: this is no trainer, it trains in a way that `Offmate` does not support, or its
            optimizer would be stepped during the backward.

    All errors of `Offmate` are raised too.
    """
    _check_trainer(trainer, options)
    options.setdefault("accumulation", trainer.args.gradient_accumulation_steps)
    with generators_kept(trainer.args.device):
        optimizer = trainer.create_optimizer()
        # Without the placements of `train()`, which would move the model and its states to the device.
        model = trainer.accelerator.prepare_model(trainer.model.train(), device_placement=False)
        args, kwargs = _call_of(trainer, model, sample)
        made = Offmate(model, args, budget, sample_kwargs=kwargs, optimizer=optimizer, **options)
    trainer.optimizer = trainer.accelerator.prepare_optimizer(optimizer, device_placement=False)
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = made
    trainer.place_model_on_device = False
    return made


def _check_trainer(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise `OffloadMisuse` if an `Offmate` cannot train in this trainer."""
    if not hasattr(trainer, "callback_handler"):
        raise OffloadMisuse(
            problem=f"trainer: is of type {type(trainer).__name__}; expected a transformers.Trainer",
            advice="make the Trainer first, or call Offmate(model, sample, budget) for a loop of your own",
        )
    if options.get("optimizer_in_backward") or offmate_config(options.get("config")).optimizer_in_backward:
        raise OffloadMisuse(
            problem="optimizer_in_backward is set, but a Trainer steps the optimizer, and clips before",
            advice="omit it",
        )
    if trainer.args.world_size > 1 or trainer.args.n_gpu > 1 or trainer.is_model_parallel:
        raise OffloadMisuse(
            problem="the Trainer trains on several devices, and Offmate is for one process on one device",
            advice="start one process that sees one device, or use RematCallback",
        )
    if trainer.model_init is not None:
        raise OffloadMisuse(
            problem="the Trainer has model_init, and train() would replace the model by another",
            advice="give the Trainer a model",
        )
    limited = [each for each in trainer.callback_handler.callbacks if isinstance(each, RematCallback)]
    if limited or state_of(trainer.model) is not None:
        raise OffloadMisuse(
            problem="the Trainer's model has a memory limit, or gets one from RematCallback",
            advice="omit the limit: the plan of Offmate decides about recomputing, too",
        )


class _Called(Exception):
    """A model was called."""


def _call_of(
    trainer: Any, model: nn.Module, sample: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a trainer calls its model in a step, computed without the model."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _Called

    count = trainer.args.gradient_accumulation_steps
    loader = trainer.get_train_dataloader() if sample is None else [sample] * count
    batches, items = trainer.get_batch_samples(iter(loader), count, trainer.args.device)
    if hasattr(loader, "end"):  # for accelerate, which takes it for the loader in use until then
        loader.end()
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        trainer.training_step(model, batches[0], num_items_in_batch=items)
    except _Called:
        pass
    finally:
        hook.remove()
    return found[0]
