"""The planned module: plans a training step for each way it is called, and runs the plans."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.capture import Captured, Tensors, capture, collect
from remat_executor.chain import Call, apply
from remat_executor.cost_cache import CostCache
from remat_executor.costs import with_costs
from remat_executor.errors import BadInput, CaptureError, RematWarning, UnplannedUse, UntruePlan
from remat_executor.guards import Signature, hooked, reason_for_original, signature, unseen_change
from remat_executor.lower import Program, lower
from remat_executor.nodes import is_item, source_of, target_of
from remat_executor.translate import Translation, translate, work_device
from remat_graph import Graph, OverBudget, simulate
from remat_graph.plan import Plan
from remat_graph.platform import Platform

Progress = Callable[[str, int, int], None]


class Planner(Protocol):
    """Any function from a graph to a plan on it."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class PlannedStep:
    """A captured step with its plan, ready to run."""

    captured: Captured
    translation: Translation
    graph: Graph
    plan: Plan
    program: Program
    direct: tuple[int, ...]  # outputs that the program makes, in its order
    differentiable: tuple[int, ...]  # places in `direct` that autograd sees
    reach: tuple[frozenset[int], ...]
    guarded: frozenset[int]
    constants: tuple[Tensor, ...]

    @classmethod
    def build(cls, captured: Captured, translation: Translation, graph: Graph, plan: Plan) -> "PlannedStep":
        """Lower the plan's schedule."""
        translation = attrs.evolve(translation, graph=graph)  # with what was measured
        direct = tuple(i for i, o in enumerate(captured.outputs) if not o.replayed)
        differentiable = tuple(
            place
            for place, i in enumerate(direct)
            if captured.outputs[i].tangent is not None or captured.outputs[i].requires_grad
        )
        tangents = [captured.outputs[direct[place]].tangent for place in differentiable]
        return cls(
            captured=captured,
            translation=translation,
            graph=graph,
            plan=plan,
            program=lower(captured, translation, plan.schedule),
            direct=direct,
            differentiable=differentiable,
            reach=_reach(translation, tangents),
            guarded=frozenset(graph.outputs),
            constants=tuple(
                getattr(captured.graph_module, str(n.target))
                for n in captured.graph_module.graph.nodes
                if n.op == "get_attr"
            ),
        )

    def run(self, tensors: Tensors) -> Any:
        """Run the forward under autograd and put the outputs into their containers."""
        captured, translation = self.captured, self.translation
        tangents = [captured.outputs[self.direct[place]].tangent for place in self.differentiable]
        flat = tensors.flat
        call = Call(
            program=self.program,
            externals=[*flat, *self.constants],
            tangents=tuple(None if t is None else t.meta["val"] for t in tangents),
            tangent_values=tuple(None if t is None else translation.value_of[t] for t in tangents),
            reach=self.reach,
            guarded=self.guarded,
            differentiable=self.differentiable,
            device=translation.device,
        )
        with torch.autocast(translation.device.type, enabled=False):
            visible = apply(call, [flat[place] for place, _, _ in translation.gradients])
        made: dict[int, Tensor] = {self.direct[p]: t for p, t in call.others.items()}
        call.others = {}
        made.update(zip((self.direct[p] for p in self.differentiable), visible, strict=True))
        sources = {captured.outputs[i].node: tensor for i, tensor in made.items()}
        sources.update(zip(captured.externals, flat, strict=True))
        leaves = []
        for place, constant in zip(captured.output_leaves, captured.output_constants, strict=True):
            if place is None:
                leaves.append(constant)
            elif place in made:
                leaves.append(made[place])
            else:
                leaves.append(_replayed(captured.outputs[place].node, sources))
        return torch_private.unflatten(leaves, captured.out_spec)


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


def _replayed(node: torch.fx.Node, sources: Mapping[torch.fx.Node, Tensor]) -> Any:
    """A view of an input or output, made under autograd as the original would."""
    if node in sources:
        return sources[node]
    source = _replayed(source_of(node), sources)
    if is_item(node):
        return source[node.args[1]]
    return target_of(node)(source, *node.args[1:], **node.kwargs)


def _reach(translation: Translation, tangents: list[torch.fx.Node | None]) -> tuple[frozenset[int], ...]:
    """For each gradient the places of the tangents it depends on."""
    graph = translation.graph
    reach: list[set[int]] = [set() for _ in graph.values]
    for place, tangent in enumerate(tangents):
        if tangent is not None:
            reach[translation.value_of[tangent]].add(place)
    for op in graph.ops:
        found = set().union(*(reach[v] for v in op.first.inputs))
        if found:
            for value in op.first.outputs:
                reach[value] |= found
    return tuple(frozenset(reach[value]) for _, _, value in translation.gradients)


def capture_graph(
    model: nn.Module,
    tensors: Tensors,
    *,
    cache: CostCache | None = None,
    platform: Platform | None = None,
    differentiate: Iterable[int] | None = None,
    seen: Signature | None = None,
    on_progress: Progress | None = None,
) -> tuple[Captured, Translation, Graph]:
    """Capture, translate and measure one training step."""
    report = on_progress or (lambda what, done, total: None)
    report("capture", 0, 1)
    captured = capture(model, tensors, differentiate=differentiate)
    report("capture", 1, 1)
    seen = seen or signature(model, tensors)
    try:
        translation = translate(captured, tensors, name=type(model).__name__, conditions=seen.conditions())
    except (KeyError, IndexError, AttributeError, NotImplementedError) as error:
        raise CaptureError(
            problem=f"it has something that is not handled yet ({type(error).__name__}: {error})",
            advice="wrap a submodule without it, and please report it",
        ) from error
    graph = with_costs(
        captured,
        translation,
        tensors,
        cache=cache,
        platform=platform,
        on_progress=lambda done, total: report("measure", done, total),
    )
    return captured, translation, graph


def plan_graph(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    platform: Platform | None = None,
    cache_dir: str | Path | None = None,
    differentiate: Iterable[int] | None = None,
    on_progress: Progress | None = None,
) -> Graph:
    """The measured graph of a training step, for planning without building a module.

    Args:
        model: the module, in the mode it will train in.
        args: positional sample inputs.
        kwargs: keyword sample inputs.
        platform: gives the times instead of the clock.
        cache_dir: folder of the cost cache; None for the user's.
        differentiate: indices among the output tensors that get gradients; None: a lone scalar in front, else
            all.
        on_progress: called with (what, done, total).
    """
    tensors = check_input(model, args, kwargs or {})
    cache = CostCache(work_device(tensors), cache_dir)
    return capture_graph(
        model,
        tensors,
        cache=cache,
        platform=platform,
        differentiate=differentiate,
        on_progress=on_progress,
    )[2]


def check_input(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensors:
    """Collect the tensors of a model and a sample; say what is wrong with them if they cannot be planned.

    Raises:
        BadInput: with what came and what to do.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(
            problem=f"the model is a {type(model).__name__}, not an nn.Module", advice="wrap it in one"
        )
    tensors = collect(model, args, kwargs)
    device = work_device(tensors)
    for tensor in tensors.inputs:
        if tensor.device != device and tensor.ndim > 0:
            raise BadInput(
                problem=f"the sample is on {tensor.device} and the model on {device}",
                advice=f"move the sample with .to({str(device)!r})",
            )
    if not any(t.requires_grad for t in tensors.flat):
        raise BadInput(
            problem="the model has no trainable parameter and no input requires a gradient",
            advice="set requires_grad on what is to be trained",
        )
    strange = unseen_change(tensors)
    if strange is not None:
        raise BadInput(
            problem=f"the sample holds a {strange}, which could change without being seen",
            advice="pass tensors, numbers, text or containers of them; a copy of a tensor of the module's",
        )
    hook = hooked(model)
    if hook is not None:
        raise BadInput(
            problem=f"{hook} has hooks, which a planned module would not call",
            advice="remove them, or plan a part of the model without them",
        )
    return tensors


@attrs.define(kw_only=True, eq=False)
class _State:
    """What a planned module has beside the original's fields."""

    MOST_STEPS: ClassVar[int] = 32

    planner: Planner
    platform: Platform | None
    cache: CostCache
    differentiate: tuple[int, ...] | None
    on_progress: Progress | None
    steps: dict[Signature, PlannedStep] = attrs.field(factory=dict)
    said: set[str] = attrs.field(factory=set)
    latest: Any = None
    latest_signature: Any = None


class PlannedModule(nn.Module):
    """An `nn.Module` equivalent to the one given, whose training step keeps to its plan.

    It shares parameters, buffers and submodules with the original: `state_dict`, `parameters`, `to`, `train`
    and optimizers see the same objects under the same names. A call in another mode, with other shapes,
    dtypes or trainable parameters is planned anew, once each; where no plan can serve (gradients off, hooks),
    the original runs and that is counted.

    Attributes:
        runs: how often a plan ran (``planned``), a new one was made (``replanned``), the original ran
            (``original``).
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

        Raises:
            BadInput: the model or the sample cannot be planned.
            CaptureError: the step is not one graph.
        """
        super().__init__()
        tensors = check_input(model, args, kwargs)
        self._attach(
            model,
            _State(
                planner=planner,
                platform=platform,
                cache=CostCache(work_device(tensors), cache_dir),
                differentiate=None if differentiate is None else tuple(differentiate),
                on_progress=on_progress,
            ),
        )
        with torch.enable_grad():
            self._plan_step(tensors, signature(model, tensors))

    def _attach(self, model: nn.Module, state: "_State") -> None:
        """Share the original's registries; everything of our own is in three fields."""
        self.__dict__.update(module=model, runs=Counter(), _remat=state)
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, run by a plan."""
        module: nn.Module = self.module
        state = self._remat
        tensors = collect(module, args, kwargs)
        reason = reason_for_original(module, tensors)
        if reason is not None:
            self.runs["original"] += 1
            self._say_once("original", f"the original module runs without a plan: {reason}")
            return module(*args, **kwargs)
        seen = signature(module, tensors)
        if seen not in state.steps:
            changes = seen.changes(state.latest_signature)
            self._say_once("replanned", f"called in another way ({changes} changed): planning again")
            self.runs["replanned"] += 1
            self._plan_step(tensors, seen)
        state.latest, state.latest_signature = state.steps[seen], seen
        self.runs["planned"] += 1
        return state.latest.run(tensors)

    def _plan_step(self, tensors: Tensors, seen: Signature) -> None:
        state = self._remat
        captured, translation, graph = capture_graph(
            self.module,
            tensors,
            cache=state.cache,
            platform=state.platform,
            differentiate=state.differentiate,
            seen=seen,
            on_progress=state.on_progress,
        )
        plan = state.planner(graph)
        _believe(graph, plan)
        if len(state.steps) >= _State.MOST_STEPS:
            del state.steps[next(iter(state.steps))]
        state.latest = state.steps[seen] = PlannedStep.build(captured, translation, graph, plan)
        state.latest_signature = seen

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._remat.said:
            self._remat.said.add(kind)
            warnings.warn(message, RematWarning, stacklevel=5)  # the caller of the module

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
            return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the original's."""
        if "module" in self.__dict__:
            setattr(self.__dict__["module"], name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedModule":
        """A copy of the original that shares the plans."""
        copied = self.__class__.__new__(self.__class__)
        nn.Module.__init__(copied)
        state = attrs.evolve(self._remat, steps=dict(self._remat.steps), said=set(self._remat.said))
        copied._attach(copy.deepcopy(self.module, memo), state)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Captured graphs cannot be pickled."""
        raise UnplannedUse(
            problem="a planned module cannot be pickled",
            advice="save its state_dict() and its plan, and plan the loaded model with that plan",
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's."""
        return self.module.load_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return self.plan.summary().splitlines()[0]
