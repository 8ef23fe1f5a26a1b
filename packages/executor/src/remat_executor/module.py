"""The planned module: plans a training step for each way it is called, and runs the plans."""

import copy
import functools
import inspect
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import nn

from remat_executor import torch_private
from remat_executor.buckets import Buckets
from remat_executor.cost_cache import CostCache
from remat_executor.errors import RematWarning, UnplannedUse, UntruePlan
from remat_executor.garbage import rare_collections
from remat_executor.guards import Signature, reason_for_original, reason_in_force
from remat_executor.parts import check_part_nbytes
from remat_executor.plans import MOST_PLANS, Plans
from remat_executor.rehearsal import within_budget
from remat_executor.runtime.choose import check_runtime, new_runtime
from remat_executor.snapshot import Snapshot
from remat_executor.step import PlannedStep
from remat_executor.stepgraph import Progress, capture_graph, check_input, output_indices
from remat_executor.tensors import REGISTRIES, Tensors, called_with
from remat_executor.translate import work_device
from remat_graph import Graph, OverBudget, simulate
from remat_graph.measured import Measurement
from remat_graph.plan import Plan
from remat_graph.platform import Platform
from remat_graph.units import format_seconds


class Planner(Protocol):
    """Any function from a graph to a plan on it."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""
        ...


def _believe(graph: Graph, plan: Plan) -> None:
    """Take no planner's word: the referee says what the schedule peaks at.

    Raises:
        InvalidSchedule: the schedule cannot be carried out.
        OverBudget: it peaks above the plan's budget, whatever the plan says.
        UntruePlan: its peak is not the one that the plan promises.
    """
    peak_nbytes = simulate(graph, plan.schedule).peak_nbytes
    if peak_nbytes > plan.budget_nbytes:
        raise OverBudget(solver=plan.solver, peak_nbytes=peak_nbytes, budget_nbytes=plan.budget_nbytes)
    if peak_nbytes != plan.peak_nbytes:
        raise UntruePlan(solver=plan.solver, promised_nbytes=plan.peak_nbytes, peak_nbytes=peak_nbytes)


def _same_work(one: Graph, other: Graph) -> bool:
    """Whether a plan for one graph is a plan for the other: what changed did not reach it."""
    return (one.values, one.ops, one.conditions) == (other.values, other.ops, other.conditions)


@attrs.define(kw_only=True, eq=False)
class _State:
    """What a planned module has beside the original's fields."""

    ENOUGH: ClassVar[int] = 3

    planner: Planner
    platform: Platform | None
    cache: CostCache
    differentiate: tuple[int, ...] | None
    on_progress: Progress | None
    runtime: str
    part_nbytes: int | None
    steps: Plans[Signature, PlannedStep]
    buckets: Buckets | None
    snapshot: Snapshot | None = None
    planning: Any = attrs.field(factory=threading.RLock)  # held while the module is captured
    said: set[str] = attrs.field(factory=set)
    in_vain: int = 0  # calls in a row that were captured anew and found the plan they had
    latest: Any = None
    latest_signature: Any = None
    forward: Any = None  # as Dynamo leaves it alone; made late, since Dynamo takes seconds to import


_SHARED = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"} | {
    name for name in REGISTRIES if "state_dict" in name
}
# `fully_shard` gives what it wraps a class of its own; mixed precision is put around `forward` by assignment.
_OWN = REGISTRIES - {"training"} | {"__class__", "forward"}


_BETWEEN = (__name__, "torch.nn.modules.module", "torch._dynamo")


class _Forward:
    """`forward` with the signature of the original's: trainers drop the inputs that it does not name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return self.function
        return _BoundForward(module.__dict__["_remat"].forward or self.function, module)


class _BoundForward(functools.partial[Any]):
    """As a bound method, which cannot have a signature of its own."""

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.module.forward)


def _callers_level() -> int:
    """The `stacklevel` at which a planned module is called: neither here nor in torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    return level


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
        tensors = check_input(model, args, kwargs)
        check_runtime(runtime, work_device(tensors))
        check_part_nbytes(part_nbytes)
        self._attach(
            model,
            _State(
                planner=planner,
                platform=platform,
                cache=CostCache(work_device(tensors), cache_dir),
                differentiate=output_indices(differentiate),
                on_progress=on_progress,
                steps=steps,
                buckets=buckets,
                runtime=runtime,
                part_nbytes=part_nbytes,
            ),
        )
        with torch.enable_grad():
            snapshot = self._snapshot()
            self._plan_step(tensors, snapshot.signature(tensors))
        self._remat.forward = torch_private.unseen_by_dynamo(PlannedModule.forward)

    def _attach(self, model: nn.Module, state: "_State") -> None:
        """Share the original's registries; everything of our own is in three fields."""
        self.__dict__.update(module=model, runs=Counter(), _remat=state)
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

    @_Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, run by a plan."""
        module: nn.Module = self.module
        state = self._remat
        given, cut = (args, kwargs), None
        reason = reason_in_force()
        if reason is None:
            if state.buckets is not None:
                args, kwargs, cut = state.buckets.padded(module, args, kwargs)
            snapshot = self._snapshot()
            tensors = called_with(snapshot.owned, args, kwargs)
            reason = reason_for_original(tensors) or snapshot.objection
        if reason is not None:
            self._count_original(reason)
            args, kwargs = given
            return module(*args, **kwargs)
        seen = snapshot.signature(tensors)
        step = state.steps.get(seen)
        if step is None:
            step = self._plan_anew(tensors, seen)
        else:
            state.in_vain = 0
        state.latest, state.latest_signature = step, seen
        self.runs["planned"] += 1
        output = step.run(tensors)
        return output if cut is None else cut(output)

    def _snapshot(self) -> Snapshot:
        """The module as it is now."""
        state = self._remat
        snapshot: Snapshot | None = state.snapshot
        if snapshot is None or not snapshot.holds():
            with state.planning:  # while another thread captures, the module holds its stand-ins
                snapshot = state.snapshot = Snapshot.take(self.module)
        return snapshot

    def _plan_anew(self, tensors: Tensors, seen: Signature) -> PlannedStep:
        """Plan for a call of another kind, and say so once."""
        state = self._remat
        with state.planning:
            step: PlannedStep | None = state.steps.get(seen)
            if step is not None:  # by another thread, meanwhile
                return step
            changes = seen.changes(state.latest_signature)
            began_s = time.perf_counter()
            step = self._plan_step(tensors, seen)
            took = format_seconds(time.perf_counter() - began_s)
            self._say_once(
                "replanned",
                f"called in another way ({changes} changed): planning again took {took}",
            )
            self.runs["replanned"] += 1
            self._note_dropped()
            if state.in_vain == _State.ENOUGH:
                self._say_once(
                    "in vain",
                    f"each call is captured anew because {changes} changes, and no op depends on it: keep it "
                    "outside of the module",
                )
            return step

    @rare_collections()
    def _plan_step(self, tensors: Tensors, seen: Signature) -> PlannedStep:
        state = self._remat
        captured, translation, graph = capture_graph(
            self.module,
            tensors,
            seen,
            cache=state.cache,
            platform=state.platform,
            differentiate=state.differentiate,
            on_progress=state.on_progress,
        )
        known = (step.plan for step in state.steps if _same_work(step.graph, graph))
        same = next(known, None)
        state.in_vain = state.in_vain + 1 if same is not None else 0
        plan = same or state.planner(graph)

        def build(plan: Plan) -> PlannedStep:
            _believe(graph, plan)
            runtime = new_runtime(state.runtime)
            with torch_private.without_any_autocast():  # as it will run
                return PlannedStep.build(captured, translation, graph, plan, runtime, state.part_nbytes)

        step = build(plan)
        if state.runtime != "eager":
            step = within_budget(step, tensors, state.planner, build, state.runtime)
        state.latest = state.steps[seen] = step
        state.latest_signature = seen
        return step

    def _note_dropped(self) -> None:
        steps: Plans[Signature, PlannedStep] = self._remat.steps
        if steps.dropped > self.runs["dropped"]:
            self.runs["dropped"] = steps.dropped
            self._say_once(
                "dropped",
                f"called in more than {steps.most} ways: the plan not used for the longest time is dropped "
                "for each new one; pad lengths with buckets=, or raise max_plans=",
            )

    def _count_original(self, reason: str) -> None:
        self.runs["original"] += 1
        if torch.is_grad_enabled():  # otherwise there is nothing to plan, and that is no news
            self._say_once("original", f"the original module runs without a plan: {reason}")

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._remat.said:
            self._remat.said.add(kind)
            warnings.warn(message, RematWarning, stacklevel=_callers_level())

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

    def _watching(self, method: Any) -> Any:
        """A method of the original's, which calls the original: without a plan, so that is counted."""

        def note(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._count_original(f"its method {method.__name__} calls it")

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            hook = self.module.register_forward_pre_hook(note)
            try:
                return method(*args, **kwargs)
            finally:
                hook.remove()

        return watched

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the original's; what every module keeps for itself, such as its hooks, is ours."""
        ours = name in _OWN or isinstance(value, _BoundForward)
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
        state = attrs.evolve(
            self._remat, snapshot=None, steps=self._remat.steps.copy(), said=set(self._remat.said)
        )
        copied._attach(copy.deepcopy(self.module, memo), state)
        for name in self.__dict__.keys() - _SHARED - {"module", "runs", "_remat"}:
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
        with self._remat.planning:
            return iter(list(self.module.named_parameters(*args, **kwargs)))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The original's."""
        with self._remat.planning:
            return iter(list(self.module.named_buffers(*args, **kwargs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        with self._remat.planning:
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        with self._remat.planning:
            return self.module.load_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return self.plan.summary().splitlines()[0]
