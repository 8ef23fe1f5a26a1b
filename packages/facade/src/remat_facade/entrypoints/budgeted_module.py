"""What the classes that a user trains with have in common."""

import torch
from torch import nn

from remat_executor import OffloadBackend, PlanFunction, PlannedModule
from remat_facade.entrypoints.inputs import Arguments, device_of
from remat_facade.entrypoints.options import CallOptions, CostOptions, RunOptions
from remat_facade.planning.memory_fit import Fit, Optimizer, fit_of
from remat_graph import parse_nbytes


class BudgetedModule(PlannedModule):
    """A model that trains within a memory budget: the base class of `Rockmate` and `Offmate`."""

    __slots__ = ("_remat_optimizer",)

    def _remat_build(
        self,
        model: nn.Module,
        arguments: Arguments,
        planner: PlanFunction,
        call: CallOptions,
        cost: CostOptions,
        run: RunOptions,
        *,
        optimizer: Optimizer,
        backend: OffloadBackend | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Capture, measure and plan a step, and become the planned module; as for `PlannedModule`.

        Args:
            model: the module.
            arguments: positional and keyword sample inputs.
            planner: from a graph to a plan.
            call: which outputs get gradients.
            cost: where the costs of operators come from.
            run: how plans run.
            optimizer: whose states count in `will_it_fit`, unless another is named there.
            backend: see there.
            device: see there.
        """
        args, kwargs = arguments
        PlannedModule.__init__(
            self,
            model,
            args,
            kwargs,
            planner,
            platform=cost.platform,
            cache_dir=cost.folder,
            differentiate=call.differentiate,
            on_progress=cost.stages,
            max_plans=run.max_plans,
            buckets=run.buckets,
            runtime=run.runtime,
            part_nbytes=run.part_nbytes,
            backend=backend,
            device=device,
        )
        object.__setattr__(self, "_remat_optimizer", optimizer)

    def will_it_fit(
        self, optimizer: Optimizer | None = None, *, device_nbytes: int | str | None = None
    ) -> Fit:
        """Add up what training with the plan that ran last makes the device hold.

        Args:
            optimizer: by name or itself; None for the one named at the beginning.
            device_nbytes: what the device has, in bytes or as a text such as "24GiB"; None to ask it.

        Raises:
            UnknownOptimizer: the optimizer's states cannot be counted.
            BadBudget: a text that is no amount of memory.
        """
        return fit_of(
            self.module,
            self.plan.budget_nbytes,
            self._remat_optimizer if optimizer is None else optimizer,
            device=device_of(self.module),
            device_nbytes=None if device_nbytes is None else parse_nbytes(device_nbytes),
        )
