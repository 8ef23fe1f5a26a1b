"""`Offmate`: a model, its gradients and its optimizer within a budget of device bytes, the rest on the host.

    model = Offmate(model, sample, "22GiB", host_budget="112GiB", optimizer=torch.optim.AdamW(...))

One plan says for every parameter, gradient, optimizer state and activation whether it stays on the device,
moves to the host and back, or is made again.
"""

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from remat_executor import Buckets
from remat_executor.module.plan_cache import MOST_PLANS
from remat_facade.config.types import Config
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.offload_options import OffloadOptions, offmate_config
from remat_facade.entrypoints.offmate_end import OffmateEnd
from remat_facade.entrypoints.options import AnyPath, CallOptions, CostOptions, PlanOptions, RunOptions
from remat_facade.errors import BadConfig
from remat_facade.planning.memory_fit import Fit
from remat_facade.planning.planner import Progress
from remat_graph import Links, Platform
from remat_offload import HostPool, HostPoolStatistics, Machine, OffloadMisuse, TrainingSession, Weights


class Offmate(BudgetedModule):
    """A model that trains within a budget of device bytes, with the rest of what training holds on the host.

    Parameters that move are tensors on the host between steps, and so are their gradients; `optimizer` is the
    user's own object, whose ``step`` may return while updates on the CPU are still under way: whoever reads a
    parameter waits for its own.

    Args:
        model: the module, in the mode it will train in.
        sample: as for `Rockmate`.
        budget: device bytes of all that training holds there: parameters, gradients, optimizer states,
            buffers, inputs and what a step makes; an int, a text such as ``"22GiB"``, or a percentage of
            what unplanned training of the sample holds beyond gradients, buffers and inputs.
        host_budget: host bytes for what moves; None for 80 % of the memory that is free.
        optimizer: over the model's parameters; None for the one that the config names, or for Adam, which
            steps during the backward.
        optimizer_in_backward: whether parameters are updated as soon as their gradients are there; None if
            no optimizer is given or named.
        master_weights: whether parameters in 16 bits are stepped in 32: the optimizer keeps a master of each.
        weights: a safetensors file, or a mapping from names to tensors. The model may be on the meta device:
            what they name is read once there is a plan, each tensor straight to its home. What they do not
            name keeps the values that it has.
        accumulation: micro-batches to a step of the optimizer, 1 by default. The plan is made for so many; a
            loop may have any other number, and the bits of plain training, in another time.
        machine: the device and its links; None for the sample's device, simulated if that is the CPU.
        pool: lends the host's memory, as much as its capacity, instead of one made for `host_budget`.
        links: bandwidths, instead of those of the platform, or measuring them.
        config: of type offmate: what is not given here is taken from there.
        sample_kwargs: as for `Rockmate`, and so are the others.

    Raises:
        NoRoom: no plan keeps both budgets.
        BadConfig: an option means nothing, or the config names no optimizer that there is.
        RefusedOptimizer: the optimizer cannot be stepped in parts.
        BadModel: there is nothing to plan, or it is planned already.
        OffloadMisuse: the optimizer does not fit the model, or an argument is of another kind.
        BadWeights: the weights do not fit the model, or leave some of it without values.
    """

    __slots__ = ("_remat_end", "_remat_training")

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        budget: int | str,
        *,
        host_budget: int | str | None = None,
        optimizer: Optimizer | None = None,
        optimizer_in_backward: bool | None = None,
        master_weights: bool | None = None,
        weights: Weights | None = None,
        accumulation: int | None = None,
        machine: Machine | None = None,
        pool: HostPool | None = None,
        links: Links | None = None,
        sample_kwargs: Mapping[str, Any] | None = None,
        reserve_nbytes: int = 0,
        config: Config | AnyPath | None = None,
        seed: int = 0,
        time_limit_s: float | None = None,
        cache_dir: AnyPath | None = None,
        platform: Platform | None = None,
        differentiate: Iterable[int] | None = None,
        on_progress: Progress | None = None,
        zoo: bool = True,
        max_plans: int = MOST_PLANS,
        buckets: Buckets | None = None,
        part_nbytes: int | None = None,
    ) -> None:
        chosen = offmate_config(config).with_(
            seed=seed or None,
            time_limit_s=time_limit_s,
            host_budget=host_budget,
            optimizer_in_backward=optimizer_in_backward,
            master_weights=master_weights,
            accumulation=accumulation,
        )
        offload = OffloadOptions(
            config=chosen, optimizer=optimizer, weights=weights, machine=machine, pool=pool, links=links
        )
        call = CallOptions(sample=sample, sample_kwargs=sample_kwargs, differentiate=differentiate)
        cost = CostOptions(platform=platform, cache_dir=cache_dir, on_progress=on_progress)
        run = RunOptions(max_plans=max_plans, buckets=buckets, part_nbytes=part_nbytes)
        options = PlanOptions(budget=budget, reserve_nbytes=reserve_nbytes, zoo=zoo)
        self._remat_offload(model, offload, options, call, cost, run)

    def _remat_offload(
        self,
        model: nn.Module,
        offload: OffloadOptions,
        options: PlanOptions,
        call: CallOptions,
        cost: CostOptions,
        run: RunOptions,
    ) -> None:
        """Check what a user gives, set up what moves values, and plan."""
        offload.check(model)
        arguments = call.arguments()
        training, end = offload.training(model, arguments)
        training.engine.owner = weakref.ref(self)
        finalizer = weakref.finalize(self, end)
        finalizer.atexit = False  # a machine that is open when the interpreter ends is its own concern
        planner = offload.planner(options, cost, training)
        training.pool.trim()
        object.__setattr__(self, "_remat_training", training)
        object.__setattr__(self, "_remat_end", end)
        self._remat_build(
            model,
            arguments,
            planner,
            call,
            cost,
            run,
            optimizer=training.optimizer,
            backend=training,
            device=training.machine.device,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer, or the one made for want of one."""
        optimizer: Optimizer = self._remat_training.optimizer
        return optimizer

    @property
    def optimizer_in_backward(self) -> bool:
        """Whether each backward steps the optimizer by itself."""
        in_backward: bool = self._remat_training.in_backward
        return in_backward

    @property
    def host(self) -> HostPoolStatistics:
        """What the host holds of it."""
        statistics: HostPoolStatistics = self._remat_training.pool.statistics
        return statistics

    def synchronize(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out.
            OffloadMisuse: each backward steps, and gradients are left that none stepped by.
        """
        self._remat_training.wait()
        self._remat_training.check_gradients()

    def close(self) -> None:
        """Finish the updates that are under way, end the lanes' threads and unpin the host's memory.

        That also happens when the last reference to the module goes. Parameters and states stay where they
        are, and are ordinary tensors. A machine or a pool that was given is left to who gave it.

        If this is interrupted, another call goes on with it.

        Raises:
            LaneFailed: an update could not be carried out.
        """
        end: OffmateEnd = self._remat_end
        end.finish()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all parameters, to the bit, beside the backward and the step.

        From the second call on the norms of gradients on the host are taken as the gradients arrive. They are
        scaled as the step reads them, or when ``.grad`` is read before. (A gradient that is changed between
        the backward and here is noticed, but not if that is done by way of ``.grad.data``.)

        Args:
            max_norm: the largest norm that gradients may have together.
            norm_type: which norm.
            error_if_nonfinite: whether a norm that is not finite is an error.
            foreach: as for torch's.

        Returns:
            the norm before, without dimensions.

        Raises:
            OffloadMisuse: each backward steps the optimizer by itself.
            MachineMisuse: the module was closed.
            RuntimeError: torch's, for a norm that is not finite.
        """
        training: TrainingSession = self._remat_training
        return training.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def accumulating(self) -> AbstractContextManager[None]:
        """Within it a backward adds to ``.grad`` and steps nothing; for models that step during the backward.

            for batch in batches[:-1]:
                with model.accumulating():
                    model(**batch).loss.backward()
            model(**batches[-1]).loss.backward()  # adds its own and steps

        Without effect for others. It counts where the backward is called, wherever the forward was.

        Raises:
            OffloadMisuse: the model was planned with ``accumulation=1``: there is no room for gradients.
        """
        training: TrainingSession = self._remat_training
        return training.accumulating()

    def will_it_fit(
        self, optimizer: str | Optimizer | None = None, *, device_nbytes: int | str | None = None
    ) -> Fit:
        """Whether the device has room for the budget, which counts all that training holds there."""
        fit = super().will_it_fit(optimizer, device_nbytes=device_nbytes)
        return attrs.evolve(fit, parameters_nbytes=0, buffers_nbytes=0, gradients_nbytes=0, states_nbytes=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offmate":
        """It owns its optimizer's states and memory of the host."""
        raise OffloadMisuse(
            problem="a module whose values move cannot be copied",
            advice="copy the original, which is its `module`, and build another",
        )

    # -- what must wait for updates that are under way

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The original's, up to date."""
        self._remat_training.wait()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, up to date."""
        self.synchronize()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, into the tensors where they are.

        Raises:
            OffloadMisuse: ``assign=True``, which would leave the optimizer with other parameters.
        """
        if kwargs.get("assign") or args[2:3] == (True,):
            raise OffloadMisuse(
                problem="load_state_dict(assign=True) gives the module parameters that its optimizer lacks",
                advice="leave assign out: values are loaded into the tensors where they are",
            )
        self._remat_training.wait()
        return super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self._remat_training.zero_grad(set_to_none)


def check_options(options: Mapping[str, Any]) -> None:
    """See that a module whose values move has all options that it is given.

    Raises:
        BadConfig: it lacks one.
    """
    known = inspect.signature(Offmate.__init__).parameters
    lacks = [name for name in options if name not in known]
    if lacks:
        problem = f"offmate has no option {', '.join(lacks)}; leave it out, or use a config of another type"
        raise BadConfig(field="type", problem=problem)
