"""A captured step with its plan, ready to run as a function under autograd."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from remat_executor.autograd.gradient_delivery import (
    PlannedCall,
    Wiring,
    run_under_autograd,
    without_autocast,
)
from remat_executor.capture.captured import Captured
from remat_executor.costs.annotate import op_cost
from remat_executor.fx_nodes import replayed
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.lower import lower
from remat_executor.lowering.program import LoweredStep
from remat_executor.lowering.runtime_protocol import Runtime
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.torch_private.pytrees import unflatten
from remat_executor.translation.recipes import OwnGradient
from remat_executor.translation.translation import Translation
from remat_graph import Graph, Plan, Update
from remat_graph.platforms.measured import Measurement

GradientLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@attrs.frozen(kw_only=True, eq=False)
class PlannedStep:
    """A captured step with its plan."""

    captured: Captured
    translation: Translation
    graph: Graph
    plan: Plan
    wiring: Wiring
    direct: tuple[int, ...]  # indices of the outputs that the lowered graphs compute, in their order
    constants: tuple[Tensor, ...]
    owners: tuple[int, ...]  # per gradient the place of the tensor that gets it
    runtime: Runtime  # runs the lowered graphs
    backend: OffloadBackend | None  # carries out what the schedule does in addition to computing
    rehearsed_nbytes: int | None = None  # the measured peak by the allocator; None if not measured
    fragments_nbytes: int | None = None  # what the allocator held beyond tensors; None if not measured

    def is_for(self, graph: Graph) -> bool:
        """Whether the plan is one for another graph too: what the two differ in affects neither."""
        mine = self.graph
        return (mine.values, mine.ops, mine.conditions) == (graph.values, graph.ops, graph.conditions)

    @classmethod
    def build(
        cls,
        captured: Captured,
        translation: Translation,
        graph: Graph,
        plan: Plan,
        runtime: Runtime,
        part_nbytes: int | None,
        backend: OffloadBackend | None,
    ) -> "PlannedStep":
        """Lower the plan's schedule."""
        translation = attrs.evolve(translation, graph=graph)  # with its measured costs
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
            wiring=Wiring(
                program=lower(captured, translation, plan.schedule, runtime=runtime, part_nbytes=part_nbytes),
                tangents=tuple(None if t is None else t.meta["val"] for t in tangents),
                tangent_values=tuple(None if t is None else translation.value_of[t] for t in tangents),
                reach=_reach(translation, tangents),
                guarded=frozenset((*graph.outputs, *graph.dropped)),
                dropped=_dropped(captured, translation, direct),
                differentiable=differentiable,
                device=translation.device,
                peak_nbytes=plan.peak_nbytes,
            ),
            direct=direct,
            constants=tuple(
                getattr(captured.graph_module, str(n.target))
                for n in captured.graph_module.graph.nodes
                if n.op == "get_attr"
            ),
            owners=tuple(place for place, _, _ in translation.gradients),
            runtime=runtime,
            backend=backend,
        )

    @functools.cached_property
    def updates(self) -> dict[int, Update]:
        """The optimizer's updates by their parameters."""
        return {update.param: update for update in self.graph.updates}

    @functools.cached_property
    def _gradient_layouts(self) -> dict[int, GradientLayout]:
        found = {}
        for _, node, value in self.translation.gradients:
            made = node.meta["val"]
            found[value] = (tuple(made.shape), made.stride(), made.dtype)
        for op, recipe in zip(self.graph.ops, self.translation.recipes, strict=True):
            if isinstance(recipe, OwnGradient):
                (value,) = op.first.outputs
                found[value] = (recipe.size, recipe.stride, found[value][2])
        return found

    def gradient_layout(self, value: int) -> GradientLayout:
        """Sizes, strides and dtype of a gradient as autograd gets it, in a storage of its own."""
        return self._gradient_layouts[value]

    @property
    def program(self) -> LoweredStep:
        """The lowered schedule."""
        return self.wiring.program

    def call(self, flat: Sequence[Tensor]) -> PlannedCall:
        """One call on the caller's tensors, in the order of `Tensors.flat`."""
        return PlannedCall(
            wiring=self.wiring,
            externals=(*flat, *self.constants) if self.constants else flat,
            autocast=torch.is_autocast_enabled(self.wiring.device.type),
            handler=None if self.backend is None else self.backend.begin(self, flat),
        )

    def measurements(self) -> list[Measurement]:
        """The measured costs of its operators, each distinct one once."""
        costs = {}
        for i, op in enumerate(self.graph.ops):
            for k, run in enumerate(op.implementations):
                cost = op_cost(self.translation, self.graph, i, k)
                if not cost.key:
                    continue  # nothing runs
                costs[cost.key] = Measurement(
                    cost=cost,
                    time_s=run.time_s,
                    workspace_nbytes=run.workspace_nbytes,
                    issue_s=run.issue_s,
                )
        return list(costs.values())

    def run(self, tensors: Tensors, on_begin: Callable[[PlannedCall], None]) -> Any:
        """Run the forward under autograd and nest its outputs; `on_begin` is called before it runs."""
        captured, flat = self.captured, tensors.flat
        call = self.call(flat)
        on_begin(call)
        owners = [flat[place] for place in self.owners]
        with without_autocast(self.wiring.device):
            visible = run_under_autograd(call, owners)
        made: dict[int, Tensor] = {self.direct[p]: t for p, t in call.others.items()}
        call.others = {}
        made.update(zip((self.direct[p] for p in self.wiring.differentiable), visible, strict=True))
        if len(made) < len(captured.outputs):
            self._replay(flat, made)
        leaves = [
            constant if place is None else made[place]
            for place, constant in zip(captured.output_leaves, captured.output_constants, strict=True)
        ]
        return unflatten(leaves, captured.out_spec)

    def _replay(self, flat: Sequence[Tensor], made: dict[int, Tensor]) -> None:
        """Add the outputs that are views of inputs or other outputs, under autograd as in the original."""
        captured = self.captured
        sources = {captured.outputs[i].node: tensor for i, tensor in made.items()}
        tensor_of = dict(zip(captured.externals, flat, strict=True))
        sources.update(tensor_of)
        sources.update((new, tensor_of[written]) for written, new in captured.mutations)
        for place, output in enumerate(captured.outputs):
            if place not in made:
                made[place] = replayed(output.node, sources)


def _dropped(
    captured: Captured, translation: Translation, direct: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The values that the caller should drop, with the places of the outputs that show them."""
    bases = [translation.base_of.get(n, n) for n in (captured.outputs[i].node for i in direct)]
    values = [translation.value_of.get(base) for base in bases]
    dropped = set(translation.graph.dropped)
    return tuple((value, place) for place, value in enumerate(values) if value in dropped)


def _reach(translation: Translation, tangents: list[torch.fx.Node | None]) -> tuple[frozenset[int], ...]:
    """For each gradient the places of the tangents that it depends on."""
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
