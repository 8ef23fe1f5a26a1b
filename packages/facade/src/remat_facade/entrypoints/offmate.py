"""`Offmate`: train a model and its optimizer within a device budget, with the remainder on the host.

    model = Offmate(model, sample, "22GiB", host_budget="112GiB", optimizer=torch.optim.AdamW(...))

One plan decides for every parameter, gradient, optimizer state and activation whether it stays on the device,
is swapped out to the host and in again, or is recomputed.
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
from remat_facade.entrypoints.inputs import as_call
from remat_facade.entrypoints.offload_options import OffloadOptions, offmate_config
from remat_facade.entrypoints.offmate_end import OffmateEnd
from remat_facade.entrypoints.options import CallOptions, CostOptions, PlanOptions, RunOptions
from remat_facade.errors import BadConfig
from remat_facade.planning.memory_fit import Fit
from remat_facade.planning.planner import Progress
from remat_graph import Links, Platform
from remat_graph.serialization.fields import AnyPath
from remat_offload import HostPool, HostPoolStatistics, Machine, OffloadMisuse, TrainingSession, Weights


class Offmate(BudgetedModule):
    """A model that trains within a device budget, and places the remaining values on the host.

    Between steps, parameters placed on the host are host tensors, and so are their gradients. `optimizer` is
    the user's own object. Its ``step`` may return while updates on the CPU are pending; a read of a parameter
    waits for the update of that parameter.

    Args:
        model: the module, in the mode of training.
        sample: as for `Rockmate`.
        budget: device bytes for all of training: parameters, gradients, optimizer states, buffers, inputs and
            the values of a step; an int, a size such as ``"22GiB"``, or a percentage of what unplanned
            training of the sample holds beyond gradients, buffers and inputs.
        host_budget: host bytes for values that move; None for 80 % of the free host memory.
        optimizer: the optimizer of the model's parameters; None for the one that the config names, or for
            Adam, which steps during the backward.
        optimizer_in_backward: whether the backward updates each parameter once its gradient is complete; None
            to do so only if no optimizer is given or named.
        master_weights: whether the optimizer keeps and steps a 32-bit master of each 16-bit parameter.
        weights: a safetensors file, or a mapping from names to tensors. The model may be on the meta device:
            after planning, each named tensor is read directly to its placement. Tensors without a name there
            keep their values.
        accumulation: micro-batches of an optimizer step, 1 by default. The plan is made for this number. Any
            other number still gives bit-identical results; only the step time differs from the prediction.
        machine: the device and its links; None for the sample's device, simulated if it is the CPU.
        pool: the pool of host memory to use, up to its capacity, instead of a new one of `host_budget` bytes.
        links: bandwidths, instead of the platform's or measured ones.
        config: a config of type offmate; arguments given here take precedence.
        sample_kwargs: this and all other arguments: as for `Rockmate`.

    Raises:
        NoRoom: no plan was found within both budgets.
        BadBudget: a budget is invalid.
        BadConfig: an option is invalid, or the config names an unknown optimizer.
        RefusedOptimizer: the optimizer cannot be stepped in parts.
        BadModel: the model cannot be planned, or is planned already.
        BadSample: the sample is not a call of the model, or is on another device.
        CaptureError: the step of the model cannot be captured as one graph.
        OffloadMisuse: the optimizer does not match the model, or an argument has the wrong type.
        BadWeights: the weights do not match the model, or leave a tensor of it without values.
        CannotPin: the host memory cannot be pinned.
    """

    __slots__ = ("_remat_end", "_remat_training")
    _remat_end: OffmateEnd
    _remat_training: TrainingSession

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
        self._remat_offload(
            model,
            offload,
            PlanOptions(budget=budget, reserve_nbytes=reserve_nbytes, zoo=zoo),
            CallOptions(arguments=as_call(sample, sample_kwargs), differentiate=differentiate),
            CostOptions(platform=platform, cache_dir=cache_dir, on_progress=on_progress),
            RunOptions(max_plans=max_plans, buckets=buckets, part_nbytes=part_nbytes),
        )

    def _remat_offload(
        self,
        model: nn.Module,
        offload: OffloadOptions,
        options: PlanOptions,
        call: CallOptions,
        cost: CostOptions,
        run: RunOptions,
    ) -> None:
        """Check the arguments, create the training session, and plan."""
        offload.check(model)
        training, end = offload.training(model, call.arguments)
        training.engine.owner = weakref.ref(self)
        finalizer = weakref.finalize(self, end)
        finalizer.atexit = False  # at interpreter exit, an open machine closes by itself
        planner = offload.planner(options, cost, training)
        training.pool.trim()
        object.__setattr__(self, "_remat_training", training)
        object.__setattr__(self, "_remat_end", end)
        self._remat_build(
            model,
            planner,
            call,
            cost,
            run,
            training.optimizer,
            backend=training,
            device=training.machine.device,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer, or the one created if none was given."""
        return self._remat_training.optimizer

    @property
    def optimizer_in_backward(self) -> bool:
        """Whether each backward steps the optimizer."""
        return self._remat_training.in_backward

    @property
    def host(self) -> HostPoolStatistics:
        """Statistics of the host memory in use."""
        return self._remat_training.pool.statistics

    def synchronize(self) -> None:
        """Wait until every pending update is done.

        Raises:
            LaneFailed: an update failed.
            OffloadMisuse: the backward steps the optimizer, and a gradient is left that no step used.
        """
        self._remat_training.wait()
        self._remat_training.check_gradients()

    def close(self) -> None:
        """Finish pending updates, end the threads of the lanes and unpin the host memory.

        The same happens when the module is garbage-collected. Parameters and states keep their placement and
        become ordinary tensors. A machine or pool that the user gave stays open. If `close` is interrupted,
        call it again.

        Raises:
            LaneFailed: an update failed.
        """
        self._remat_end.finish()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip all gradients: bit-identical to torch's `clip_grad_norm_`, overlapping backward and step.

        From the second call on, norms of gradients on the host are computed while the gradients arrive. The
        gradients are scaled when the step or the user reads them. A change of a gradient between the backward
        and this call is detected, unless it was made through ``.grad.data``.

        Args:
            max_norm: the largest total norm of the gradients.
            norm_type: the p of the norm.
            error_if_nonfinite: whether a total norm that is not finite is an error.
            foreach: as for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The total norm before clipping, a tensor of shape ().

        Raises:
            OffloadMisuse: the backward steps the optimizer.
            MachineMisuse: the module was closed.
            RuntimeError: the total norm is not finite, and `error_if_nonfinite` is set.
        """
        return self._remat_training.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def accumulating(self) -> AbstractContextManager[None]:
        """A context in which a backward adds to ``.grad`` without stepping; for steps during the backward.

            for batch in batches[:-1]:
                with model.accumulating():
                    model(**batch).loss.backward()
            model(**batches[-1]).loss.backward()  # adds its own gradients and steps

        It has no effect if `optimizer.step()` steps. It applies to a backward called inside, wherever the
        forward was called.

        Raises:
            OffloadMisuse: the plan has ``accumulation=1``, and so no memory for gradients.
        """
        return self._remat_training.accumulating()

    def will_it_fit(
        self, optimizer: str | Optimizer | None = None, *, device_nbytes: int | str | None = None
    ) -> Fit:
        """Whether the device can hold the budget, which covers all of training."""
        fit = super().will_it_fit(optimizer, device_nbytes=device_nbytes)
        return attrs.evolve(fit, parameters_nbytes=0, buffers_nbytes=0, gradients_nbytes=0, states_nbytes=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offmate":
        """Refuse the copy: the module owns optimizer states and host memory."""
        raise OffloadMisuse(
            problem="a module with offloaded values cannot be copied",
            advice="copy the original, which is its `module`, and build a new one from the copy",
        )

    # -- methods that wait for pending updates

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the original, after all pending updates."""
        self._remat_training.wait()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the original, after all pending updates."""
        self.synchronize()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load values into the present tensors, in their placement.

        Raises:
            OffloadMisuse: ``assign=True``, which would replace the parameters that the optimizer has.
        """
        if kwargs.get("assign") or args[2:3] == (True,):
            raise OffloadMisuse(
                problem="load_state_dict(assign=True) replaces parameters that the optimizer has",
                advice="omit assign, so that values are loaded into the present tensors",
            )
        self._remat_training.wait()
        return super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self._remat_training.zero_grad(set_to_none)


def check_options(options: Mapping[str, Any]) -> None:
    """Check that `Offmate` has every option of a mapping.

    Raises:
        BadConfig: `Offmate` has no such option.
    """
    known = inspect.signature(Offmate.__init__).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        problem = f"offmate has no option {', '.join(unknown)}; omit it, or use a config of another type"
        raise BadConfig(field="type", problem=problem)
