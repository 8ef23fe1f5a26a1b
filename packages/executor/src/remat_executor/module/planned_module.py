"""`PlannedModule` runs the planned training step and delegates everything else to the wrapped module."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat_executor.costs.annotate import costs_on
from remat_executor.costs.check_platform import check_platform
from remat_executor.errors import CaptureError, UnplannedUse
from remat_executor.fork_lock import ForkAwareLock
from remat_executor.guards.objections import reason_for_original, reason_in_force
from remat_executor.inspection.devices import check_device
from remat_executor.inspection.tensors import Tensors, called_with
from remat_executor.lowering.gradient_segments import check_part_nbytes
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.module.buckets import Buckets
from remat_executor.module.combined_class import attribute_of, class_for
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.forward_descriptor import NOTHING, Forward, ForwardTarget, must_be_planned
from remat_executor.module.gradient_states import (
    GradientsState,
    GradientStates,
    checked_state,
    planner_for,
)
from remat_executor.module.input_checks import check_input, output_indices
from remat_executor.module.pipeline import CostSource, PipelineStages, PlanFunction, Progress
from remat_executor.module.plan_cache import MOST_PLANS, LRUCache
from remat_executor.module.replanning import PlanManager
from remat_executor.module.shared_captures import SharedCaptures
from remat_executor.module.training_watch import TrainingWatch
from remat_executor.runtime.registry import RuntimeFactory, runtime_factory
from remat_executor.torch_private.dynamo import unseen_by_dynamo
from remat_executor.translation.dropped_outputs import OutputsState
from remat_executor.ways.registry import families
from remat_executor.ways.substitution import Family
from remat_graph import Grads, Graph, Plan, Platform
from remat_graph.platforms.measured import Measurement


class PlannedModule(nn.Module):
    """An `nn.Module` equivalent to the wrapped one, whose training step follows a plan.

    Its class derives from the original's class, and both objects share all attributes: parameters, buffers,
    submodules, hooks and whatever else is set on one of them. Only a function assigned to `forward` belongs
    to the planned module alone. A call in another mode, with other shapes, dtypes or trainable parameters
    gets a plan of its own, made once. Where no plan can serve (gradients off, hooks on submodules), the
    original runs and the call is counted in `runs`.
    """

    # Names that are not for users begin with `_remat`: methods of the original's class look theirs up here.
    __slots__ = ("_remat", "_remat_binding")

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> "PlannedModule":
        """An object of a class that derives from the model's class."""
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
        runtime: str | RuntimeFactory = "eager",
        part_nbytes: int | None = None,
        backend: OffloadBackend | None = None,
        device: torch.device | None = None,
        costs: CostSource | None = None,
        ways: Iterable[Family] | None = None,
        outputs: OutputsState = "kept",
        gradients: GradientsState = "auto",
        share_captures: bool = False,
    ) -> None:
        """Capture, measure and plan a step; the model, its buffers and the generators stay unchanged.

        Args:
            model: the module, in the mode it will train in.
            args: positional sample inputs.
            kwargs: keyword sample inputs.
            planner: from a graph to a plan.
            platform: gives the times instead of the clock.
            cache_dir: folder of the cost cache; None for the user's.
            differentiate: indices among the output tensors that get gradients; None: a scalar in front is a
                loss and the only one, otherwise all.
            on_progress: called with (what, done, total).
            max_plans: how many plans are kept, one for each way of calling; the least recently used is
                dropped first.
            buckets: pads inputs to a few lengths, which bounds the number of plans.
            runtime: what runs the plan: ``"eager"``, ``"inductor"``, ``"cudagraph"`` or a factory of
                runtimes. The peak of all but ``"eager"`` is measured, and the step replanned with a margin
                if it exceeds the budget; `planner` must then be a `MarginPlanner`. With such a planner an
                eager step is measured too, on CUDA, if the blocks of the allocator could exceed the budget.
            part_nbytes: bytes of gradients that may wait before the backward delivers them; 0 to deliver each
                by itself, None for as many deliveries as cost a hundredth of the step.
            backend: carries out what plans do in addition to computing; None if they only compute.
            device: where plans run; None: where the model is. With it, the model may be on the meta device if
                `backend` fills its tensors when it places them.
            costs: gives graphs their times and workspaces; None: measured ones, or those of `platform`.
            ways: families of other ways to run ops, of which plans may choose; None for all that are exact.
                Only plans that do nothing but compute, and run eagerly or as CUDA graphs, have a choice.
            outputs: "dropped" if the caller drops the outputs that are not differentiated before the
                backward, so that plans need not hold them then.
            gradients: whether calls find a `.grad` for every parameter: "present" plans for that at once and
                otherwise when a call finds none, "new" never, "auto" once it pays off. Runtimes other than
                ``"eager"`` and plans with a backend have one plan, for "new".
            share_captures: whether calls that differ in sizes alone share a capture, made with symbols for
                the sizes. Only for a forward that does nothing but arithmetic and comparisons with sizes.

        Raises:
            BadInput: the model or the sample cannot be planned, or platform, max_plans, buckets or
                part_nbytes are invalid.
            CaptureError: the step is not one graph.
            StepOverBudget: the runtime needs more than the budget with every plan that was tried.
        """
        check_platform(platform)
        if buckets is not None and isinstance(model, nn.Module):
            args, kwargs, _ = buckets.padded(model, args, kwargs)
        if device is not None:
            check_device(device)
        tensors = check_input(model, args, kwargs, device)
        device = device or tensors.device
        check_part_nbytes(part_nbytes)
        lock = ForkAwareLock("a module that is planned")
        state = checked_state(gradients, other_plans=runtime == "eager" and backend is None)
        first = planner_for(planner, Grads.PRESENT if state == "present" else Grads.NEW)
        stages = PipelineStages(
            costs=costs or costs_on(device, cache_dir, platform),
            differentiate=output_indices(differentiate),
            on_progress=on_progress,
            device=device,
            new_runtime=runtime_factory(runtime, device),
            runtime=runtime if isinstance(runtime, str) else "custom",
            replanner=first,
            part_nbytes=part_nbytes,
            backend=backend,
            families=() if runtime == "inductor" or backend is not None else families(ways),
            outputs=outputs,
            captures=SharedCaptures() if share_captures and backend is None else None,
        )
        manager = PlanManager(
            binding=getattr(self, "_remat_binding", None) or ForwardBinding(original=model),
            planner=first,
            stages=stages,
            platform=platform,
            buckets=buckets,
            steps=LRUCache(max_plans),
            gradients=GradientStates(state=state, planner=planner, stages=stages, lock=lock),
            lock=lock,
        )
        _plan_sample(manager, tensors)
        self._remat_attach(manager)

    @classmethod
    def _remat_bound(cls, binding: ForwardBinding, *args: Any, **kwargs: Any) -> "PlannedModule":
        """Plan `binding.original` with these arguments; the forwards of `binding` are what the plans run."""
        made = PlannedModule.__new__(cls, binding.original)  # a subclass checks what its users give
        object.__setattr__(made, "_remat_binding", binding)
        cls.__init__(made, binding.original, *args, **kwargs)
        return made

    def _remat_warn_if_uncalled(self) -> None:
        """Warn once if training steps the parameters before it calls this module."""
        manager: PlanManager = self._remat
        manager.watch = TrainingWatch(self, manager.warn_uncalled)

    def _remat_attach(self, manager: PlanManager) -> None:
        """Share the original's attributes."""
        if manager.binding.runner is None:
            manager.binding.forward = unseen_by_dynamo(vars(PlannedModule)["forward"].function)
            manager.binding.runner = unseen_by_dynamo(PlannedModule._remat_run)
        object.__setattr__(self, "__dict__", manager.original.__dict__)
        object.__setattr__(self, "_remat", manager)

    @property
    def module(self) -> nn.Module:
        """The original module."""
        original: nn.Module = self._remat.original
        return original

    @property
    def runs(self) -> Counter[str]:
        """Counts of calls that ran by a plan (``planned``) or ran the original (``original``).

        ``replanned`` counts plans made for new ways of calling, ``dropped`` plans dropped for newer ones.
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
        """In how many segments that plan's backward delivers its gradients."""
        return len(self._remat.latest.program.backward)

    @property
    def rehearsed_nbytes(self) -> int | None:
        """The measured peak of that plan's step by the allocator; None if it was not measured.

        With CUDA graphs, it includes the memory pool that is held between steps.
        """
        nbytes: int | None = self._remat.latest.rehearsed_nbytes
        return nbytes

    @property
    def fragments_nbytes(self) -> int | None:
        """What CUDA's allocator held beyond tensors in that step, in bytes; None if it was not measured."""
        nbytes: int | None = self._remat.latest.fragments_nbytes
        return nbytes

    def measurements(self) -> list[Measurement]:
        """The measured costs of that plan's operators on this device, to be saved as a `Measured` platform.

        Raises:
            UnplannedUse: the times come from a platform.
        """
        if self._remat.platform is not None:
            raise UnplannedUse(
                problem=f"the times of this plan are those of {self._remat.platform.name}, not measured",
                advice="plan without platform= on the device to measure",
            )
        found: list[Measurement] = self._remat.latest.measurements()
        return found

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's result, computed by a plan."""
        return self._remat_run(self._remat.binding.first, *args, **kwargs)

    def _remat_run(self, target: ForwardTarget, /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward by a plan."""
        manager: PlanManager = self._remat
        if manager.watch is not None:
            manager.watch.called()
        if manager.binding.inside:
            return manager.binding.resolved(target)(*args, **kwargs)
        with nullcontext() if manager.backend is None else manager.backend.call_context():
            uncapturable, output = self._remat_serve(target, args, kwargs)
        return (
            output if uncapturable is None else manager.run_uncapturable(target, args, kwargs, uncapturable)
        )

    def _remat_serve(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str | None, Any]:
        """Return (None, output) of a plan or the original, or (reason, None) if `target` is uncapturable."""
        manager: PlanManager = self._remat
        padded, trim = args, None
        named: Mapping[str, Any] = kwargs
        reason = reason_in_force()
        if reason is None:
            if manager.buckets is not None:
                padded, named, trim = manager.buckets.padded(manager.original, args, kwargs)
            snapshot = manager.current_snapshot(target)
            tensors = called_with(snapshot.owned, padded, named, manager.numbers.inputs)
            reason = reason_for_original(tensors) or snapshot.objection
        if reason is not None:
            return None, manager.run_original(target, args, kwargs, reason)
        signature = manager.signature(snapshot, tensors, target)
        uncapturable = manager.uncapturable.get(signature.forward)
        if uncapturable is not None:
            return uncapturable, None
        try:
            step, tensors = manager.step_for(tensors, signature, target)
        except CaptureError as error:
            if signature.forward is None or must_be_planned(target):
                raise
            manager.uncapturable[signature.forward] = error.problem
            return error.problem, None
        if step is None:
            reason = "nothing that it returns requires a gradient"
            return None, manager.run_original(target, args, kwargs, reason)
        manager.runs["planned"] += 1
        output = step.run(tensors, manager.begin_call)
        return None, output if trim is None else trim(output)

    # -- everything else is delegated to the original

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a shared attribute; a name that is a property here is set on the original."""
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fset is None:
            setattr(self._remat.original, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Look a missing attribute up on the original."""
        if name in PlannedModule.__slots__:  # not attached yet
            raise AttributeError(name)
        return attribute_of(self._remat, name)

    @property
    def _compiled_call_impl(self) -> None:  # type: ignore[override]
        """None, since a compiled call left on the original would replace the plan."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing but warn."""
        self._remat.warn_compiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedModule":
        """A copy of the module that shares the plans."""
        copied: PlannedModule = object.__new__(type(self))
        memo[id(self)] = copied
        manager: PlanManager = self._remat
        copied._remat_attach(manager.copied(copy.deepcopy(manager.original, memo)))
        if manager.binding.assigned is not NOTHING:
            copied._remat.binding.assigned = copy.deepcopy(manager.binding.assigned, memo)
        self._remat_copy_slots(copied, memo)
        return copied

    def _remat_copy(
        self, original: nn.Module, binding: ForwardBinding, memo: dict[int, Any]
    ) -> "PlannedModule":
        """The planned module of a copied original, with the copy's forwards; it shares the plans."""
        copied: PlannedModule = object.__new__(type(self))
        manager: PlanManager = self._remat.copied(original)
        manager.binding = binding
        copied._remat_attach(manager)
        self._remat_copy_slots(copied, memo)
        return copied

    def _remat_copy_slots(self, copied: "PlannedModule", memo: dict[int, Any]) -> None:
        for kind in type(self).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if name not in PlannedModule.__slots__:
                    object.__setattr__(copied, name, copy.deepcopy(getattr(self, name), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, since captured graphs cannot be."""
        raise UnplannedUse(
            problem="a planned module cannot be pickled",
            advice="save its state_dict() and its plan, and plan the loaded model with that plan",
        )

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse copies for several devices, since a plan is for one device."""
        raise UnplannedUse(
            problem="a planned module cannot be copied to several devices by DataParallel",
            advice="use DistributedDataParallel, a process for each device",
        )

    # While another thread captures, the module holds fake tensors: these methods wait for its end.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Delegate to the original."""
        with self._remat.lock:
            return iter(list(self.module.named_parameters(*args, **kwargs)))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Delegate to the original."""
        with self._remat.lock:
            return iter(list(self.module.named_buffers(*args, **kwargs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to the original."""
        with self._remat.lock:
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to the original."""
        with self._remat.lock:
            return self.module.load_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return self.plan.summary().splitlines()[0]


def _plan_sample(manager: PlanManager, tensors: Tensors) -> None:
    target = manager.binding.target()
    with torch.enable_grad():
        manager.plan(tensors, manager.signature(manager.current_snapshot(target), tensors, target), target)
