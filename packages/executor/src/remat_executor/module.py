"""The planned module: runs plans in the place of the original, and is it in all else."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat_executor import torch_private
from remat_executor.buckets import Buckets
from remat_executor.cost_cache import CostCache
from remat_executor.errors import UnplannedUse
from remat_executor.forwarding import BoundForward, Forward
from remat_executor.guards import Signature, reason_for_original, reason_in_force
from remat_executor.handler import Handlers
from remat_executor.parts import check_part_nbytes
from remat_executor.planning import Planner, Planning
from remat_executor.plans import MOST_PLANS, Plans
from remat_executor.runtime.choose import check_runtime
from remat_executor.step import PlannedStep
from remat_executor.stepgraph import Progress, check_input, output_indices
from remat_executor.tensors import REGISTRIES, called_with
from remat_executor.translate import work_device
from remat_graph import Graph
from remat_graph.measured import Measurement
from remat_graph.plan import Plan
from remat_graph.platform import Platform

_SHARED = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"} | {
    name for name in REGISTRIES if "state_dict" in name
}
# `fully_shard` gives what it wraps a class of its own; mixed precision is put around `forward` by assignment.
_COMPILED = "_compiled_call_impl"  # what `compile()` leaves, to be called instead
_OWN = REGISTRIES - {"training"} | {"__class__", "forward", _COMPILED}


class PlannedModule(nn.Module):
    """An `nn.Module` equivalent to the one given, whose training step keeps to its plan.

    It shares parameters, buffers and submodules with the original: `state_dict`, `parameters`, `to`, `train`
    and optimizers see the same objects under the same names. A call in another mode, with other shapes,
    dtypes or trainable parameters is planned anew, once each; where no plan can serve (gradients off, hooks),
    the original runs and that is counted.

    Attributes:
        runs: how often a plan ran (``planned``), a new one was made (``replanned``), the original ran
            (``original``), and how many plans were dropped to make room (``dropped``).
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        planner: Planner,
        *,
        platform: Platform | None = None,
        cache_dir: str | Path | None = None,
        differentiate: Iterable[int] | None = None,
        on_progress: Progress | None = None,
        max_plans: int = MOST_PLANS,
        buckets: Buckets | None = None,
        runtime: str = "eager",
        part_nbytes: int | None = None,
        handlers: Handlers | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Capture, measure and plan a step; the model, its buffers and the generators stay as they are.

        Args:
            model: the module, in the mode it will train in.
            args: positional sample inputs.
            kwargs: keyword sample inputs.
            planner: from a graph to a plan.
            platform: gives the times instead of the clock.
            cache_dir: folder of the cost cache; None for the user's.
            differentiate: indices among the output tensors that get gradients; None: a lone scalar in front
                is a loss and the only one, otherwise all.
            on_progress: called with (what, done, total).
            max_plans: how many plans are kept, one for each way of calling; the least recently used goes
                first.
            buckets: pads inputs to a few lengths, so that there are as few plans.
            runtime: what runs the plan: ``"eager"``, ``"inductor"`` or ``"cudagraph"``. The last two are
                rehearsed once, and planned tighter where they take more than the plan says; the planner must
                then have a method ``tighter``.
            part_nbytes: bytes of gradients that wait together at most before the backward hands them over;
                0 for each by itself, None for as many parts as cost a hundredth of the step.
            handlers: carry out what plans do beside computing; None if they only compute.
            device: where plans run; None: where the model is. With it, the model may be on the meta device if
                `handlers` give it values as they bring it to its homes.

        Raises:
            BadInput: the model or the sample cannot be planned, or max_plans, buckets or part_nbytes mean
                nothing.
            CaptureError: the step is not one graph.
            OverCompiled: the runtime takes more than the budget, however it is planned.
        """
        super().__init__()
        steps: Plans[Signature, PlannedStep] = Plans(max_plans)
        if buckets is not None and isinstance(model, nn.Module):
            args, kwargs, _ = buckets.padded(model, args, kwargs)
        tensors = check_input(model, args, kwargs, device)
        device = device or work_device(tensors)
        check_runtime(runtime, device)
        check_part_nbytes(part_nbytes)
        planning = Planning(
            planner=planner,
            platform=platform,
            cache=CostCache(device, cache_dir),
            differentiate=output_indices(differentiate),
            on_progress=on_progress,
            runtime=runtime,
            part_nbytes=part_nbytes,
            buckets=buckets,
            handlers=handlers,
            device=device,
            steps=steps,
        )
        self._attach(model, planning)
        with torch.enable_grad():
            seen = planning.seen(planning.look_at(model), tensors)
            planning.plan(model, tensors, seen)
        planning.forward = torch_private.unseen_by_dynamo(PlannedModule.forward)

    def _attach(self, model: nn.Module, planning: Planning) -> None:
        """Share the original's registries; everything of our own is in three fields."""
        self.__dict__.update(module=model, runs=planning.runs, _remat=planning)
        for registry in _SHARED:
            self.__dict__[registry] = model.__dict__[registry]

    @property
    def plan(self) -> Plan:
        """The plan that ran last (at first, the sample's)."""
        plan: Plan = self._remat.latest.plan
        return plan

    @property
    def graph(self) -> Graph:
        """The graph of that plan."""
        graph: Graph = self._remat.latest.graph
        return graph

    @property
    def parts(self) -> int:
        """In how many parts that plan's backward hands over its gradients."""
        return len(self._remat.latest.program.backward)

    @property
    def rehearsed_nbytes(self) -> int | None:
        """The allocator's peak of that plan's step, where its runtime had to be tried; None for eager."""
        nbytes: int | None = self._remat.latest.rehearsed_nbytes
        return nbytes

    def measurements(self) -> list[Measurement]:
        """What the operators of that plan's step take on this device, to be kept as a `Measured` platform.

        Raises:
            UnplannedUse: the times come from a platform.
        """
        if self._remat.platform is not None:
            raise UnplannedUse(
                problem=f"the times of this plan are those of {self._remat.platform.name}, not measured",
                advice="plan without platform= on the device to be measured",
            )
        found: list[Measurement] = self._remat.latest.measurements()
        return found

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, run by a plan."""
        module: nn.Module = self.module
        planning: Planning = self._remat
        if planning.handlers is not None:
            planning.handlers.enter()
        padded, cut = args, None
        named: Mapping[str, Any] = kwargs
        reason = reason_in_force()
        if reason is None:
            if planning.buckets is not None:
                padded, named, cut = planning.buckets.padded(module, args, kwargs)
            snapshot = planning.look_at(module)
            tensors = called_with(snapshot.owned, padded, named)
            reason = reason_for_original(tensors) or snapshot.objection
        if reason is not None:
            return planning.run_original(module, args, kwargs, reason)
        step = planning.step_for(module, tensors, planning.seen(snapshot, tensors))
        if step is None:
            return planning.run_original(module, args, kwargs, "nothing that it returns requires a gradient")
        self.runs["planned"] += 1
        output = step.run(tensors)
        return output if cut is None else cut(output)

    # -- what is not ours is the original's

    @property
    def training(self) -> bool:
        """The original's mode."""
        module = self.__dict__.get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    def __getattr__(self, name: str) -> Any:
        """What this module lacks, the original may have: `config`, `generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:
                raise
            found = getattr(self.__dict__["module"], name)
        return self._watching(found) if inspect.ismethod(found) else found

    def __getitem__(self, key: Any) -> Any:
        """The original's, as of an `nn.Sequential`."""
        return self.module[key]

    def _watching(self, method: Any) -> Any:
        """A method of the original's, which calls the original: without a plan, so that is counted."""
        under_way: list[contextlib.ExitStack] = []

        def begin(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._remat.count_original(f"its method {method.__name__} calls it")
            under_way.append(contextlib.ExitStack())
            under_way[-1].enter_context(self._remat.original())

        def end(module: nn.Module, args: Any, output: Any) -> None:
            under_way.pop().close()

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            hooks = [
                self.module.register_forward_pre_hook(begin),
                self.module.register_forward_hook(end, always_call=True),
            ]
            try:
                return method(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
                while under_way:  # a hook of somebody's may have raised in between
                    under_way.pop().close()

        return watched

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the original's; what every module keeps for itself, such as its hooks, is ours."""
        ours = name in _OWN or isinstance(value, BoundForward)
        if "module" in self.__dict__ and not ours:
            setattr(self.__dict__["module"], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Attributes are the original's, but for those of our own."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.__dict__["module"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedModule":
        """A copy of the original, and of what is our own, that shares the plans."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied._attach(copy.deepcopy(self.module, memo), self._remat.copied())
        for name in self.__dict__.keys() - _SHARED - {"module", "runs", "_remat", _COMPILED}:
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Captured graphs cannot be pickled."""
        raise UnplannedUse(
            problem="a planned module cannot be pickled",
            advice="save its state_dict() and its plan, and plan the loaded model with that plan",
        )

    # While another thread captures, the module holds stand-ins for its tensors: these wait for it.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The original's."""
        with self._remat.lock:
            return iter(list(self.module.named_parameters(*args, **kwargs)))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The original's."""
        with self._remat.lock:
            return iter(list(self.module.named_buffers(*args, **kwargs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        with self._remat.lock:
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        with self._remat.lock:
            return self.module.load_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return self.plan.summary().splitlines()[0]
