"""A captured step with its plan, ready to run."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from remat_executor import torch_private
from remat_executor.capture import Captured
from remat_executor.chain import Call, apply
from remat_executor.lower import Program, lower
from remat_executor.nodes import replayed
from remat_executor.runtime import Runtime, eager
from remat_executor.tensors import Tensors
from remat_executor.translate import Translation
from remat_graph import Graph
from remat_graph.plan import Plan


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
    rehearsed_nbytes: int | None = None  # peak by the allocator, where the runtime had to be tried

    @classmethod
    def build(
        cls,
        captured: Captured,
        translation: Translation,
        graph: Graph,
        plan: Plan,
        runtime: Runtime = eager,
    ) -> "PlannedStep":
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
            program=lower(captured, translation, plan.schedule, runtime=runtime),
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

    def call(self, flat: Sequence[Tensor]) -> Call:
        """One call on the caller's tensors, in the order of `Tensors.flat`."""
        captured, translation = self.captured, self.translation
        tangents = [captured.outputs[self.direct[place]].tangent for place in self.differentiable]
        return Call(
            program=self.program,
            externals=[*flat, *self.constants],
            tangents=tuple(None if t is None else t.meta["val"] for t in tangents),
            tangent_values=tuple(None if t is None else translation.value_of[t] for t in tangents),
            reach=self.reach,
            guarded=self.guarded,
            differentiable=self.differentiable,
            device=translation.device,
            autocast=torch.is_autocast_enabled(translation.device.type),
        )

    def run(self, tensors: Tensors) -> Any:
        """Run the forward under autograd and put the outputs into their containers."""
        captured, translation = self.captured, self.translation
        flat = tensors.flat
        call = self.call(flat)
        with torch.autocast(translation.device.type, enabled=False):
            visible = apply(call, [flat[place] for place, _, _ in translation.gradients])
        made: dict[int, Tensor] = {self.direct[p]: t for p, t in call.others.items()}
        call.others = {}
        made.update(zip((self.direct[p] for p in self.differentiable), visible, strict=True))
        sources = {captured.outputs[i].node: tensor for i, tensor in made.items()}
        tensor_of = dict(zip(captured.externals, flat, strict=True))
        sources.update(tensor_of)
        sources.update((new, tensor_of[written]) for written, new in captured.mutations)
        leaves = []
        for place, constant in zip(captured.output_leaves, captured.output_constants, strict=True):
            if place is None:
                leaves.append(constant)
            elif place in made:
                leaves.append(made[place])
            else:
                # A view of an input or output, made under autograd as the original would.
                leaves.append(replayed(captured.outputs[place].node, sources))
        return torch_private.unflatten(leaves, captured.out_spec)


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
