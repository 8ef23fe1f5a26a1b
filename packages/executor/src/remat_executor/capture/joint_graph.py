"""Capture: a module and a sample become one joint forward and backward fx graph.

The module is traced as a function of flat tensors: its distinct parameters, its distinct buffers, the
distinct tensors of the sample and those that it holds in plain attributes. Everything else in the sample is a
constant that the module's guards compare at each call.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.capture.collectives import refuse_collective
from remat_executor.capture.dropout import use_eager_rounding
from remat_executor.capture.explain import explained, foreign_generator, where
from remat_executor.capture.recurrent import keep_workspaces
from remat_executor.capture.side_effects import Watched, no_other_randomness
from remat_executor.capture.user_errors import ask
from remat_executor.errors import CaptureError, NothingToDifferentiate, UnplannedUse, add_note, warn
from remat_executor.fx_nodes import args_of
from remat_executor.inspection.attribute_changes import Changes
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.capture import Joint, export_joint
from remat_executor.torch_private.pytrees import flatten, unflatten


@attrs.frozen(kw_only=True)
class Output:
    """One tensor among the module's flat outputs.

    Attributes:
        node: the fx node that makes it.
        tangent: the placeholder of its tangent, if it is differentiated.
        requires_grad: whether the original's output does.
        replayed: it is a view of an input or of another output, made outside the planned region by replaying
            it.
    """

    node: torch.fx.Node
    tangent: torch.fx.Node | None
    requires_grad: bool
    replayed: bool


@attrs.frozen(kw_only=True)
class Captured:
    """What capture found.

    Attributes:
        graph_module: the joint graph; owns the constants that the trace lifted.
        externals: placeholders of `Tensors.flat`, in its order.
        outputs: the tensors among the flat outputs, then bases that only their views return.
        output_leaves: per flat output the index into `outputs`, or None for a constant.
        output_constants: flat outputs that are no tensors, None where they are.
        out_spec: structure of the output.
        mutations: (placeholder, node of its new content).
        gradients: (placeholder, node of its gradient); placeholders without a gradient do not appear.
    """

    graph_module: torch.fx.GraphModule
    externals: tuple[torch.fx.Node, ...]
    outputs: tuple[Output, ...]
    output_leaves: tuple[int | None, ...]
    output_constants: tuple[Any, ...]
    out_spec: Any
    mutations: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    gradients: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]


class _Step(nn.Module):
    """The module as a function of flat tensors; notes the structure of what it returned."""

    def __init__(
        self,
        module: nn.Module,
        tensors: Tensors,
        differentiate: Iterable[int] | None,
        call: Callable[..., Any],
        usual: Any,
    ) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList()
        for _, parameter in tensors.parameters:
            self.parameters_.append(parameter)
        self.buffers_ = nn.Module()
        for i, (_, buffer) in enumerate(tensors.buffers):
            self.buffers_.register_buffer(str(i), buffer)
        # In the instance's dict, hidden from nn.Module: its parameters are those above.
        self.__dict__["_original"] = module
        self.__dict__["_tensors"] = tensors
        self.__dict__["_call"] = call
        self.__dict__["_usual"] = usual
        self.__dict__["_differentiate"] = None if differentiate is None else set(differentiate)
        self.found: dict[str, Any] = {}

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        tensors: Tensors = self.__dict__["_tensors"]
        flat = (
            *self.parameters_,
            *(self.buffers_.get_buffer(str(i)) for i in range(len(tensors.buffers))),
            *inputs,
        )
        owned = [names for names, _ in (*tensors.parameters, *tensors.buffers)]
        swapped = {name: tensor for names, tensor in zip(owned, flat, strict=False) for name in names}
        leaves = [
            constant if place is None else inputs[place]
            for place, constant in zip(tensors.leaves, tensors.constants, strict=True)
        ]
        args, kwargs = unflatten(leaves, tensors.spec)
        held = [flat[slot.place] for slot in tensors.slots]
        watched = Watched(self.__dict__["_original"], swapped, held, self.__dict__["_call"])
        named = {f"original.{name}": tensor for name, tensor in swapped.items()}
        behind = False
        try:
            output = torch.func.functional_call(watched, named, (tensors, *args), kwargs, tie_weights=False)
        except Exception as error:
            behind = watched.is_behind(error)
            if not behind:
                raise
        if behind:
            raise watched.taken()  # not where the other one is handled: that is no context of it
        leaves, spec = flatten(output)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        requires = [leaf.requires_grad for leaf in found]
        wanted: set[int] | None = self.__dict__["_differentiate"]
        _check_choice(wanted, requires, (leaf for leaf in leaves if not isinstance(leaf, Tensor)))
        usual = self.__dict__["_usual"] in (None, spec)
        chosen = default_choice(found, usual) if wanted is None else wanted
        self.found.update(
            spec=spec,
            requires=requires,
            chosen=chosen,
            constants=[None if isinstance(leaf, Tensor) else _remade(leaf) for leaf in leaves],
            is_tensor=[isinstance(leaf, Tensor) for leaf in leaves],
            replaced=watched.replaced,
            changes=watched.changes,
        )
        return [
            leaf.detach() if needs and i not in chosen else leaf
            for i, (leaf, needs) in enumerate(zip(found, requires, strict=True))
        ]


@attrs.frozen
class UnavailableOutput:
    """Stands where the original returns an object that a captured graph cannot remake."""

    type_name: str

    def __getattr__(self, name: str) -> Any:
        """Say so, whatever is asked of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnplannedUse(
            problem=f"a planned module does not return its {self.type_name}",
            advice="turn it off (for example use_cache=False) or use the original, at `.module`",
        )


def _remade(leaf: Any) -> Any:
    """An output that is no tensor: a constant of the step, or an object that holds what capture made."""
    plain = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
    return leaf if isinstance(leaf, plain) else UnavailableOutput(type(leaf).__name__)


def _check_choice(wanted: set[int] | None, requires: list[bool], others: Iterable[Any]) -> None:
    if not any(requires):
        opaque = sorted({type(o).__name__ for o in others if isinstance(_remade(o), UnavailableOutput)})
        beside = f" ({', '.join(opaque)} is not looked into)" if opaque else ""
        raise NothingToDifferentiate(
            problem=f"the model returns no tensor that requires a gradient{beside}",
            advice="return a loss or output that does, in a tuple, list, dict or on its own",
        )
    for i in wanted or ():
        if not (0 <= i < len(requires) and requires[i]):
            possible = [place for place, needs in enumerate(requires) if needs]
            raise CaptureError(
                problem=f"output {i} cannot be differentiated",
                advice=f"name some of {possible} in differentiate=[...]",
            )
    if wanted is not None and not wanted:
        raise CaptureError(problem="differentiate=[] names no output", advice="name one, or leave it out")


def default_choice(outputs: list[Tensor], usual: bool = True) -> set[int]:
    """Which outputs a caller will differentiate: a lone scalar in front is a loss, otherwise all.

    Args:
        outputs: the tensors among them.
        usual: whether they come as the model's do. What a trainer returns instead it may use otherwise.
    """
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    if usual and differentiable and outputs[differentiable[0]].ndim == 0:
        return {differentiable[0]}
    return set(differentiable)


def capture(
    module: nn.Module,
    tensors: Tensors,
    *,
    differentiate: Iterable[int] | None = None,
    call: Callable[..., Any] | None = None,
    usual: Any = None,
) -> Captured:
    """Trace one training step; leaves the module, its buffers and every random generator as they were.

    Args:
        module: the user's module, in the mode to capture.
        tensors: what `collect` found of it and the sample.
        differentiate: indices among the output tensors that get gradients; None: see `default_choice`.
        call: what to trace instead of the module's forward.
        usual: structure of what the module's own forward returns; None: that of what is traced.

    Raises:
        CaptureError: the step is not one graph, with the line where it stops and what to do.
        Exception: whatever the original raises when it is called in this way, with a note.
    """
    call = call or module.forward
    step = _Step(module, tensors, differentiate, call, usual)
    step.train(module.training)
    # What another graph made is a leaf of this one; torch looks for the .grad of each.
    inputs = tuple(t if t.is_leaf else t.detach().requires_grad_(t.requires_grad) for t in tensors.inputs)
    stopped: Exception | None = None
    try:
        with no_other_randomness(tensors):
            joint = export_joint(step, inputs)
    except CaptureError as refused:
        place = where(refused, module)
        if not place:
            raise
        raise attrs.evolve(refused, problem=refused.problem + place) from refused
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises, on fake tensors
        stopped = error
    if stopped is not None:  # not where it is handled: it is no context of the user's error
        try:
            runs = raise_as_original(module, tensors, call)
            raise explained(stopped, module, runs=runs) from stopped
        finally:
            del stopped
    changes: Changes = step.found["changes"]
    if changes.state:
        names = ", ".join(changes.state[:3])
        raise CaptureError(
            problem=f"the forward changes {names}, which a captured graph would not do again",
            advice="do it outside of the forward, or in place in a buffer: buffer.add_(1); if the first call "
            "alone does it, call the model once before",
        )
    captured = _read(joint, step.found, tensors)
    if changes.kept:
        warn(f"the forward sets {', '.join(changes.kept[:3])}: a planned module does not do that")
    return captured


def raise_as_original(module: nn.Module, tensors: Tensors, call: Callable[..., Any]) -> bool:
    """Raise what the original raises when it is called in this way.

    Args:
        module: the original.
        tensors: its tensors and the call's.
        call: its forward, or what is planned in its place.

    Returns:
        Whether the original is known to raise nothing.

    Raises:
        Exception: the original's, with a note that says so and where.
    """

    def forward(copies: Tensors) -> object:
        return _Step(module, copies, None, call, None).train(module.training)(*copies.inputs)

    answer = ask(forward, tensors)
    if answer.error is None:
        return answer.runs
    add_note(
        answer.error,
        f"raised{where(answer.error, module)} while this call was planned; the original raises the same when "
        "it is called alone: give inputs that it takes",
    )
    try:
        raise answer.error
    finally:
        del answer  # or its traceback would lead to itself, and hold the user's tensors


def _read(joint: Joint, found: dict[str, Any], tensors: Tensors) -> Captured:
    """Sort placeholders and outputs of the joint graph by their descriptors."""
    graph = joint.graph_module.graph
    use_eager_rounding(graph)
    keep_workspaces(graph)
    placeholders: dict[str, torch.fx.Node] = {}
    tangents: dict[str, torch.fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        described = node.meta["desc"]
        if described.is_tangent():
            tangents[described.output.expr()] = node
        else:
            placeholders[described.expr()] = node
    externals = _externals(placeholders, tensors)
    for tangent in tangents.values():
        written = getattr(tangent.meta["desc"].output, "mutated_input", None)
        if written is not None:
            name = tensors.names[externals.index(placeholders[written.expr()])]
            raise CaptureError(
                problem=f"the forward writes into {name!r}, which requires a gradient",
                advice="write into it outside of the forward, after the optimizer's step say",
            )
    if joint.reshaped:
        raise CaptureError(
            problem="the forward changes the shape of an input in place, as unsqueeze_ does",
            advice="make a view instead: x = x.unsqueeze(0)",
        )
    _check_effects(joint.graph_module, externals, found["replaced"], tensors)

    output_node = graph.output_node()
    plain: dict[int, tuple[torch.fx.Node, str]] = {}
    bases: list[Output] = []
    mutations, gradients = [], []
    for value, described in zip(args_of(output_node)[0], output_node.meta["desc"], strict=True):
        kind = type(described).__name__ if described is not None else ""
        if not isinstance(value, torch.fx.Node):
            continue
        if kind == "PlainAOTOutput":
            plain[described.idx] = (value, described.expr())
        elif kind == "InputMutationAOTOutput":
            mutations.append((placeholders[described.mutated_input.expr()], value))
        elif kind == "GradAOTOutput":
            gradients.append((placeholders[described.grad_of.expr()], value))
        elif kind == "IntermediateBaseAOTOutput":
            base = Output(
                node=value, tangent=tangents.get(described.expr()), requires_grad=True, replayed=False
            )
            bases.append(base)
        else:
            effects = {
                str(n.args[1]) for n in graph.nodes if getattr(n.target, "_name", "") == "with_effects"
            }
            raise CaptureError(
                problem=f"the step has an effect that is not handled yet ({', '.join(effects) or kind})",
                advice="wrap a submodule that does not have it",
            )
    outputs = []
    for i, needs in enumerate(found["requires"]):
        value, name = plain[i]
        own = tangents.get(name)
        of_input = joint.aliases[i] in ("is_input", "alias_of_input")
        replayed = own is None and (of_input or (needs and i in found["chosen"]))
        outputs.append(Output(node=value, tangent=own, requires_grad=needs, replayed=replayed))
    counter = iter(range(len(outputs)))
    return Captured(
        graph_module=joint.graph_module,
        externals=externals,
        outputs=(*outputs, *bases),
        output_leaves=tuple(next(counter) if is_tensor else None for is_tensor in found["is_tensor"]),
        output_constants=tuple(found["constants"]),
        out_spec=found["spec"],
        mutations=tuple(mutations),
        gradients=tuple(gradients),
    )


def _check_effects(
    graph_module: torch.fx.GraphModule,
    externals: Sequence[torch.fx.Node],
    replaced: set[int],
    tensors: Tensors,
) -> None:
    """Refuse what the trace let through and a lowered graph would not do right.

    Raises:
        CaptureError: a tensor is read and then replaced, a generator is passed, a gradient is sparse, other
            ranks are spoken to.
    """
    for index in sorted(replaced):
        if externals[index].users:
            name = tensors.names[index]
            raise CaptureError(
                problem=f"the forward reads {name!r} and puts a new tensor in its place, which a captured "
                "graph would not do again",
                advice="keep such state in a buffer and write it in place: buffer.copy_(...)",
            )
    for node in graph_module.graph.nodes:
        refuse_collective(node.target)
        constant = getattr(graph_module, node.target) if node.op == "get_attr" else None
        given = (*node.args, *node.kwargs.values(), constant)
        if any(isinstance(argument, torch.Generator) for argument in given):
            raise foreign_generator()
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                problem=f"{node.target} makes a tensor of layout {value.layout}, which is not handled yet",
                advice="use dense tensors (sparse=False)",
            )


def _externals(placeholders: dict[str, torch.fx.Node], tensors: Tensors) -> tuple[torch.fx.Node, ...]:
    """Placeholders in the order of `Tensors.flat`."""
    by_place: dict[tuple[str, int], torch.fx.Node] = {}
    for node in placeholders.values():
        described = node.meta["desc"]
        if described.is_param() or described.is_buffer():
            kind, _, number = described.target.rpartition(".")
            by_place[kind, int(number)] = node
        elif hasattr(described, "idx"):
            by_place["input", described.idx] = node
        else:
            raise CaptureError(
                problem=f"an input is not handled yet ({described.expr()})",
                advice="pass clones instead of tensors that share a storage",
            )
    wanted = [("parameters_", i) for i in range(len(tensors.parameters))]
    wanted += [("buffers_", i) for i in range(len(tensors.buffers))]
    wanted += [("input", i) for i in range(len(tensors.inputs))]
    return tuple(by_place[key] for key in wanted)
