"""The base class of the modules that a user trains with."""

from typing import Any, Self, cast

import torch
from torch import nn

from remat_executor import OffloadBackend, PlanFunction, PlannedModule
from remat_facade.entrypoints.check_call import check_call
from remat_facade.entrypoints.inputs import check_forward, device_of
from remat_facade.entrypoints.model_budget import size_of
from remat_facade.entrypoints.options import CallOptions, CostOptions, RunOptions
from remat_facade.planning.memory_fit import Fit, Optimizer, fit_of


class BudgetedModule(PlannedModule):
    """A model that trains within a memory budget: the base class of `Rockmate` and `Offmate`."""

    __slots__ = ("_remat_optimizer",)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object of a class that derives from the model's class, after a check of the call."""
        check_call(cls, args, kwargs)
        return cast("Self", super().__new__(cls, *args, **kwargs))

    def _remat_build(
        self,
        model: nn.Module,
        planner: PlanFunction,
        call: CallOptions,
        cost: CostOptions,
        run: RunOptions,
        optimizer: Optimizer,
        *,
        backend: OffloadBackend | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Capture, measure and plan a step; `optimizer` is the default of `will_it_fit`."""
        if getattr(self, "_remat_binding", None) is None:  # `limit_memory` has checked it; it may be assigned
            check_forward(model)
        PlannedModule.__init__(
            self,
            model,
            *call.arguments,
            planner,
            platform=cost.platform,
            cache_dir=cost.folder,
            differentiate=call.differentiate,
            on_progress=cost.stages,
            runtime=run.runtime,
            max_plans=run.max_plans,
            buckets=run.buckets,
            part_nbytes=run.part_nbytes,
            backend=backend,
            device=device,
            ways=run.families,
            outputs=run.outputs,
            gradients=run.gradients,
        )
        object.__setattr__(self, "_remat_optimizer", optimizer)

    def will_it_fit(
        self, optimizer: Optimizer | None = None, *, device_nbytes: int | str | None = None
    ) -> Fit:
        """Add up the device memory of training with the plan that ran last.

        Args:
            optimizer: by name or itself; None for the one given to the constructor.
            device_nbytes: memory of the device, as bytes or a size such as "24GiB"; None to query the device.

        Raises:
            UnknownOptimizer: the size of the optimizer's states is unknown.
            BadBudget: `device_nbytes` is not a size.
        """
        return fit_of(
            self.module,
            self.plan.budget_nbytes,
            self._remat_optimizer if optimizer is None else optimizer,
            device=device_of(self.module),
            device_nbytes=None if device_nbytes is None else size_of(device_nbytes, "device_nbytes"),
        )
