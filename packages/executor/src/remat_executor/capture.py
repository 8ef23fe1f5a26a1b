"""Capture: a module and a sample become one joint forward and backward fx graph.

The module is traced as a function of flat tensors: its distinct parameters, its distinct buffers and the
distinct tensors of the sample. Distinct means by identity, so a tied parameter is one input whose gradient
autograd sums in its own order. Everything else in the sample is a constant that the module's guards compare
at each call.
"""

import contextlib
import random
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.attributes import kept_attributes
from remat_executor.dropout import use_eager_rounding
from remat_executor.errors import CaptureError, RematWarning, UnplannedUse
from remat_executor.nodes import args_of
from remat_executor.recurrent import keep_workspaces
from remat_executor.rng import preserved_generators


@attrs.frozen(kw_only=True)
class Tensors:
    """The distinct tensors of a module and of one call.

    Attributes:
        parameters: (names, parameter) with every name that reaches it.
        buffers: (names, buffer) likewise.
        inputs: distinct tensors among the arguments.
        leaves: per leaf of the arguments the index into `inputs`, or None for a constant.
        constants: the leaves that are not tensors, None where they are.
        spec: structure of ``(args, kwargs)``.
    """

    parameters: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    buffers: tuple[tuple[tuple[str, ...], Tensor], ...]
    inputs: tuple[Tensor, ...]
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]
    spec: Any

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Parameters, then buffers, then inputs."""
        return (*(p for _, p in self.parameters), *(b for _, b in self.buffers), *self.inputs)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each of `flat`."""
        inputs = (f"input{i}" for i in range(len(self.inputs)))
        return (*(n[0] for n, _ in self.parameters), *(n[0] for n, _ in self.buffers), *inputs)


def collect(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensors:
    """Find the distinct tensors of a module and of a call."""
    leaves, spec = torch_private.flatten((args, dict(kwargs)))
    index: dict[int, int] = {}
    inputs: list[Tensor] = []
    places: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            places.append(None)
            continue
        if id(leaf) not in index:
            index[id(leaf)] = len(inputs)
            inputs.append(leaf)
        places.append(index[id(leaf)])
    return Tensors(
        parameters=_distinct(_slots(module, "_parameters")),
        buffers=_distinct(_slots(module, "_buffers")),
        inputs=tuple(inputs),
        leaves=tuple(places),
        constants=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        spec=spec,
    )


def _slots(module: nn.Module, registry: str) -> Iterator[tuple[str, Any]]:
    """Every place that holds a parameter or buffer, by name; a submodule used twice counts once."""
    for prefix, submodule in module.named_modules():
        for name, tensor in submodule.__dict__[registry].items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _distinct(named: Iterable[tuple[str, Any]]) -> tuple[tuple[tuple[str, ...], Any], ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple((tuple(names[key]), tensors[key]) for key in tensors)


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

    def __init__(self, module: nn.Module, tensors: Tensors, differentiate: Iterable[int] | None) -> None:
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
        self.__dict__["_differentiate"] = None if differentiate is None else set(differentiate)
        self.found: dict[str, Any] = {}

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        tensors: Tensors = self.__dict__["_tensors"]
        swapped: dict[str, Tensor] = {}
        for (names, _), parameter in zip(tensors.parameters, self.parameters_, strict=True):
            swapped.update(dict.fromkeys(names, parameter))
        for i, (names, _) in enumerate(tensors.buffers):
            swapped.update(dict.fromkeys(names, self.buffers_.get_buffer(str(i))))
        leaves = [
            constant if place is None else inputs[place]
            for place, constant in zip(tensors.leaves, tensors.constants, strict=True)
        ]
        args, kwargs = torch_private.unflatten(leaves, tensors.spec)
        probe = _Probe(self.__dict__["_original"], swapped)
        named = {f"original.{name}": tensor for name, tensor in swapped.items()}
        seed = torch.initial_seed()
        output = torch.func.functional_call(probe, named, args, kwargs, tie_weights=False)
        if torch.initial_seed() != seed:
            raise CaptureError(
                problem="the forward seeds torch's generator, which a captured graph would not do",
                advice="seed outside of it",
            )
        leaves, spec = torch_private.flatten(output)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        requires = [leaf.requires_grad for leaf in found]
        wanted: set[int] | None = self.__dict__["_differentiate"]
        _check_choice(wanted, requires)
        chosen = default_choice(found) if wanted is None else wanted
        self.found.update(
            spec=spec,
            requires=requires,
            chosen=chosen,
            constants=[None if isinstance(leaf, Tensor) else _remade(leaf) for leaf in leaves],
            is_tensor=[isinstance(leaf, Tensor) for leaf in leaves],
        )
        return [
            leaf.detach() if needs and i not in chosen else leaf
            for i, (leaf, needs) in enumerate(zip(found, requires, strict=True))
        ]


class _Probe(nn.Module):
    """Calls the original and sees whether it put other tensors in the place of its own."""

    def __init__(self, original: nn.Module, swapped: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.original = original
        self.__dict__["swapped"] = swapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original; raises `CaptureError` if it assigned a parameter or buffer."""
        output = self.original(*args, **kwargs)
        for name, tensor in self.__dict__["swapped"].items():
            path, _, attribute = name.rpartition(".")
            if getattr(self.original.get_submodule(path), attribute) is not tensor:
                raise CaptureError(
                    problem=f"the forward puts a new tensor in the place of {name!r}",
                    advice=f"write into it instead: self.{attribute}.copy_(...)",
                )
        return output


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


def _check_choice(wanted: set[int] | None, requires: list[bool]) -> None:
    if not any(requires):
        raise CaptureError(
            problem="the model returns no tensor that requires a gradient",
            advice="plan a module whose output or loss does",
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


def default_choice(outputs: list[Tensor]) -> set[int]:
    """Which outputs a caller will differentiate: a lone scalar in front is a loss, otherwise all."""
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    if differentiable and outputs[differentiable[0]].ndim == 0:
        return {differentiable[0]}
    return set(differentiable)


def capture(
    module: nn.Module,
    tensors: Tensors,
    *,
    differentiate: Iterable[int] | None = None,
) -> Captured:
    """Trace one training step; leaves the module, its buffers and every random generator as they were.

    Args:
        module: the user's module, in the mode to capture.
        tensors: what `collect` found of it and the sample.
        differentiate: indices among the output tensors that get gradients; None: see `default_choice`.

    Raises:
        CaptureError: the step is not one graph, with the line where it stops and what to do.
    """
    step = _Step(module, tensors, differentiate)
    step.train(module.training)
    with kept_attributes(module) as (state, kept), _no_other_randomness(tensors):
        try:
            joint = torch_private.export_joint(step, tensors.inputs)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, module) from error
    if state:
        raise CaptureError(
            problem=f"the forward changes {', '.join(state[:3])}, which a captured graph would not do again",
            advice="keep such state in a buffer and write it in place",
        )
    if kept:
        warnings.warn(
            f"the forward sets {', '.join(kept[:3])}: a planned module does not do that",
            RematWarning,
            stacklevel=2,
        )
    return _read(joint, step.found, tensors)


@contextlib.contextmanager
def _no_other_randomness(tensors: Tensors) -> Iterator[None]:
    """Put generators back, and refuse a forward that moves one in a way that no graph repeats."""
    before = (random.getstate(), np.random.get_state())
    try:
        with preserved_generators(t.device for t in tensors.flat):
            yield
    finally:
        drew_python, drew_numpy = random.getstate() != before[0], not _same_numpy(before[1])
        random.setstate(before[0])
        np.random.set_state(before[1])
    if drew_python or drew_numpy:
        raise CaptureError(
            problem=f"the forward draws from {'Python' if drew_python else 'numpy'}'s random module, which a "
            "captured graph cannot repeat",
            advice="draw with torch instead, or wrap the submodules around the draw",
        )


def _same_numpy(before: Any) -> bool:
    now = np.random.get_state()
    return all(np.array_equal(a, b) for a, b in zip(now, before, strict=True))


def _explained(error: Exception, module: nn.Module) -> CaptureError:
    """Turn what the trace raised into one line with the user's line in it."""
    library = torch.__path__[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    frames = [f for f in frames if not f.filename.startswith(str(Path(__file__).parent))]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    if torch_private.is_data_dependent(error):
        return CaptureError(
            problem=f"a branch depends on the values of a tensor{where}",
            advice="wrap the submodules on either side of it instead of the whole model",
        )
    if isinstance(error, TypeError) and not frames:
        # Nobody's code but torch's was reached: the call itself does not fit.
        return CaptureError(
            problem=f"{type(module).__name__} cannot be called with this sample: {error}",
            advice="give a sample that it takes",
        )
    first_line = (str(error).splitlines() or [""])[0][:300]
    return CaptureError(
        problem=f"{type(error).__name__}: {first_line}{where}",
        advice=f"wrap a submodule of {type(module).__name__} that does not contain this line",
    )


def _read(joint: torch_private.Joint, found: dict[str, Any], tensors: Tensors) -> Captured:
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
            tangent = tangents.get(described.expr())
            bases.append(Output(node=value, tangent=tangent, requires_grad=True, replayed=False))
        else:
            raise CaptureError(
                problem=f"the step has an effect that is not handled yet ({kind})",
                advice="wrap a submodule that does not have it",
            )
    outputs = []
    for i, needs in enumerate(found["requires"]):
        value, name = plain[i]
        tangent = tangents.get(name)
        replayed = tangent is None and (joint.aliases[i] == "is_input" or (needs and i in found["chosen"]))
        outputs.append(Output(node=value, tangent=tangent, requires_grad=needs, replayed=replayed))
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
