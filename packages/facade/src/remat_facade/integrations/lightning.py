"""A callback for Lightning.

    Trainer(callbacks=[MemoryLimit("20GiB")])

What is limited is the module that a `LightningModule` trains, not the `LightningModule` itself, whose
`training_step` also logs. Where the environment variable ``REMAT_BUDGET`` is set, every trainer has this
callback, since Lightning asks installed packages for callbacks.
"""

import os
from typing import Any, Unpack

from torch import nn

from remat_facade.entrypoints.keywords import LimitKeywords
from remat_facade.entrypoints.limit_memory import BUDGET, check_limit, limit_memory, limited_in, planned
from remat_facade.errors import BadModel
from remat_facade.integrations.extras import from_extra
from remat_facade.integrations.named_module import check_name, module_named
from remat_facade.integrations.plan_report import plan_figures, plan_text, warn_uncalled

with from_extra("lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_info


class MemoryLimit(Callback):  # type: ignore[misc]
    """Limit the memory of the module that a `LightningModule` trains.

    Args:
        budget: as for `limit_memory`.
        module: the name of the module, such as ``"model"`` or ``"net.encoder"``; None for the only child with
            parameters to train.
        **options: as for `limit_memory`.
    """

    def __init__(
        self, budget: int | str | None = None, *, module: str | None = None, **options: Unpack[LimitKeywords]
    ) -> None:
        check_limit("MemoryLimit", budget, options)
        check_name(module)
        self.budget, self.module, self.options = budget, module, options
        self.limited: nn.Module | None = None
        self.reported = self.warned = False

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Limit the module, unless that is done since an earlier fit."""
        chosen = module_named(pl_module, self.module or _only_trained(pl_module))
        if self.limited is not chosen:
            self.limited = limit_memory(chosen, self.budget, **self.options)
            self.reported = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Report the plan after the first batch, or that there is none."""
        if self.reported or self.limited is None:
            return
        if planned(self.limited) is None:
            self.warned = self.warned or warn_uncalled(self.limited)
            return
        self.reported = True
        rank_zero_info(plan_text(self.limited))
        for logger in trainer.loggers:
            logger.log_metrics(plan_figures(self.limited), step=trainer.global_step)


class _LimitOfEnvironment(MemoryLimit):
    """Leaves a `LightningModule` alone in which something has a limit, by the script or another callback."""

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Limit the module if nothing of it has or gets a limit, but for one by this in an earlier fit."""
        others = any(isinstance(each, MemoryLimit) and each is not self for each in trainer.callbacks)
        if not others and all(module is self.limited for module in limited_in(pl_module)):
            super().on_fit_start(trainer, pl_module)


def callbacks_of_environment() -> list[Callback]:
    """What Lightning adds to every trainer: the callback, if the environment has a budget."""
    return [_LimitOfEnvironment()] if os.environ.get(BUDGET) else []


def _only_trained(module: nn.Module) -> str:
    """The name of the only child with parameters to train.

    Raises:
        BadModel: there are others, the module has such parameters itself, or there are none.
    """
    names = [
        name for name, child in module.named_children() if any(p.requires_grad for p in child.parameters())
    ]
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if len(names) == 1 and not own:
        return names[0]
    kind = type(module).__name__
    if names:
        found = ", ".join(names + ["parameters of its own"] * own)
        problem = f'{kind} trains {found}: name the module to limit, as in MemoryLimit("20GiB", module='
        raise BadModel(problem=f'{problem}"{names[0]}"), or limit each with limit_memory')
    if own:
        advice = "limit it with limit_memory(module, budget), and let training_step call self(...)"
        raise BadModel(problem=f"{kind} trains parameters of its own only: {advice}")
    raise BadModel(problem=f"no parameter of {kind} requires a gradient, so nothing of it is trained")
