"""The planned module: runs plans in the place of the original, and is it in all else."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat_executor.costs.annotate import with_costs
from remat_executor.costs.cache import CostCache
from remat_executor.errors import CaptureError, UnplannedUse
from remat_executor.guards.signature import Signature, reason_for_original, reason_in_force
from remat_executor.inspection.tensors import called_with
from remat_executor.lowering.gradient_segments import check_part_nbytes
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.module.buckets import Buckets
from remat_executor.module.combined_class import attribute_of, class_for
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.forward_descriptor import NOTHING, Forward, ForwardTarget
from remat_executor.module.pipeline import PipelineStages, PlanFunction, Progress
from remat_executor.module.plan_cache import MOST_PLANS, LRUCache
from remat_executor.module.planned_step import PlannedStep
from remat_executor.module.replanning import PlanManager
from remat_executor.module.step_graph import check_input, output_indices
from remat_executor.runtime.registry import check_runtime, new_runtime
from remat_executor.torch_private.dynamo import unseen_by_dynamo
from remat_executor.translation.translate import work_device
from remat_graph import Graph
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform
from remat_graph.platforms.measured import Measurement


class PlannedModule(nn.Module):
    """An `nn.Module` equivalent to the one given, whose training step keeps to its plan.

    It is of the original's class too, and shares the original's attributes: parameters, buffers, submodules,
    hooks and whatever else is set on one of the two is there on the other. Only what is assigned to its
    `forward` is its own. A call in another mode, with other shapes, dtypes or trainable parameters is planned
    anew, once each; where no plan can serve (gradients off, hooks on submodules), the original runs and that
    is counted.
    """

    # Beside the attributes that are shared. Names that are not for users begin with `_remat`: methods of the
    # original's class find theirs on this object.
    __slots__ = ("_remat",)

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> "PlannedModule":
        """An object of a class that is the model's too."""
        plannable = isinstance(model, nn.Module) and not isinstance(model, PlannedModule)
        made: PlannedModule = object.__new__(class_for(cls, model) if plannable else cls)
        return made

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        planner: PlanFunction,
        *,
        platform: Platform | None = None,
        cache_dir: str | Path | None = None,
        differentiate: Iterable[int] | None = None,
        on_progress: Progress | None = None,
        max_plans: int = MOST_PLANS,
        buckets: Buckets | None = None,
        runtime: str = "eager",
        part_nbytes: int | None = None,
        backend: OffloadBackend | None = None,
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
                then be a `MarginPlanner`.
            part_nbytes: bytes of gradients that wait together at most before the backward hands them over;
                0 for each by itself, None for as many parts as cost a hundredth of the step.
            backend: carry out what plans do beside computing; None if they only compute.
            device: where plans run; None: where the model is. With it, the model may be on the meta device if
                `backend` give it values as they bring it to its homes.

        Raises:
            BadInput: the model or the sample cannot be planned, or max_plans, buckets or part_nbytes mean
                nothing.
            CaptureError: the step is not one graph.
            OverCompiled: the runtime takes more than the budget, however it is planned.
        """
        steps: LRUCache[Signature, PlannedStep] = LRUCache(max_plans)
        if buckets is not None and isinstance(model, nn.Module):
            args, kwargs, _ = buckets.padded(model, args, kwargs)
        tensors = check_input(model, args, kwargs, device)
        device = device or work_device(tensors)
        check_runtime(runtime, device)
        check_part_nbytes(part_nbytes)
        manager = PlanManager(
            binding=ForwardBinding(original=model),
            planner=planner,
            stages=PipelineStages(
                costs=partial(with_costs, cache=CostCache(device, cache_dir), platform=platform),
                differentiate=output_indices(differentiate),
                on_progress=on_progress,
                device=device,
                new_runtime=partial(new_runtime, runtime),
                runtime=runtime,
                tightening=planner,
                part_nbytes=part_nbytes,
                backend=backend,
            ),
            platform=platform,
            buckets=buckets,
            steps=steps,
        )
        target = manager.binding.target()
        with torch.enable_grad():
            manager.plan(
                tensors, manager.signature(manager.current_snapshot(target), tensors, target), target
            )
        manager.binding.forward = unseen_by_dynamo(vars(PlannedModule)["forward"].function)
        manager.binding.runner = unseen_by_dynamo(PlannedModule._remat_run)
        self._remat_attach(manager)

    def _remat_attach(self, manager: PlanManager) -> None:
        """Share the original's attributes."""
        object.__setattr__(self, "__dict__", manager.original.__dict__)
        object.__setattr__(self, "_remat", manager)

    @property
    def module(self) -> nn.Module:
        """The original."""
        original: nn.Module = self._remat.original
        return original

    @property
    def runs(self) -> Counter[str]:
        """How often a plan ran and what else happened.

        ``planned``: a plan ran; ``replanned``: a new one was made; ``original``: the original ran;
        ``dropped``: a plan was dropped to make room.
        """
        runs: Counter[str] = self._remat.runs
        return runs

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
        return self._remat_run(self._remat.binding.first, *args, **kwargs)

    def _remat_run(self, target: ForwardTarget, *args: Any, **kwargs: Any) -> Any:
        """Run what a forward stands for, by a plan."""
        manager: PlanManager = self._remat
        if manager.binding.inside:
            return manager.binding.resolved(target)(*args, **kwargs)
        with nullcontext() if manager.backend is None else manager.backend.call_context():
            why, output = self._remat_serve(target, args, kwargs)
        return output if why is None else manager.run_uncapturable(target, args, kwargs, why)

    def _remat_serve(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str | None, Any]:
        """What a plan returns, or the original; or why what was assigned lies outside of any plan."""
        manager: PlanManager = self._remat
        padded, cut = args, None
        named: Mapping[str, Any] = kwargs
        reason = reason_in_force()
        if reason is None:
            if manager.buckets is not None:
                padded, named, cut = manager.buckets.padded(manager.original, args, kwargs)
            snapshot = manager.current_snapshot(target)
            tensors = called_with(snapshot.owned, padded, named)
            reason = reason_for_original(tensors) or snapshot.objection
        if reason is not None:
            return None, manager.run_original(target, args, kwargs, reason)
        signature = manager.signature(snapshot, tensors, target)
        why = manager.uncapturable.get(signature.forward)
        if why is not None:
            return why, None
        try:
            step = manager.step_for(tensors, signature, target)
        except CaptureError as error:
            if signature.forward is None:
                raise
            manager.uncapturable[signature.forward] = error.problem
            return error.problem, None
        if step is None:
            reason = "nothing that it returns requires a gradient"
            return None, manager.run_original(target, args, kwargs, reason)
        manager.runs["planned"] += 1
        output = step.run(tensors, manager.begin_call)
        return None, output if cut is None else cut(output)

    # -- what is not ours is the original's

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are shared; what only we show is the original's to set."""
        shown = getattr(type(self), name, None)
        if isinstance(shown, property) and shown.fset is None:
            setattr(self._remat.original, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """What this module lacks, the original may have."""
        if name == "_remat":  # not attached yet
            raise AttributeError(name)
        return attribute_of(self._remat, name)

    @property
    def _compiled_call_impl(self) -> None:  # type: ignore[override]
        """None: what `compile` left on the original would be called in the place of a plan."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, and say so."""
        self._remat.warn_compiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedModule":
        """A copy of the original, and of what is our own, that shares the plans."""
        copied: PlannedModule = object.__new__(type(self))
        memo[id(self)] = copied
        manager: PlanManager = self._remat
        copied._remat_attach(manager.copied(copy.deepcopy(manager.original, memo)))
        if manager.binding.assigned is not NOTHING:
            copied._remat.binding.assigned = copy.deepcopy(manager.binding.assigned, memo)
        for kind in type(self).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if name != "_remat":
                    object.__setattr__(copied, name, copy.deepcopy(getattr(self, name), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Captured graphs cannot be pickled."""
        raise UnplannedUse(
            problem="a planned module cannot be pickled",
            advice="save its state_dict() and its plan, and plan the loaded model with that plan",
        )

    def _replicate_for_data_parallel(self) -> Any:
        """One plan is for one device."""
        raise UnplannedUse(
            problem="a planned module cannot be copied to several devices by DataParallel",
            advice="use DistributedDataParallel, a process for each device",
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
