"""The function that is traced: a module as a function of flat tensors, which also records its outputs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.capture.absent_device import SeenDevice
from remat_executor.capture.constant_branches import ConstantBranches
from remat_executor.capture.layers import LayerRecorder
from remat_executor.capture.number_inputs import NumberInput
from remat_executor.capture.side_effects import SideEffectGuard
from remat_executor.errors import CaptureError, NothingToDifferentiate, UnplannedUse
from remat_executor.inspection.attribute_changes import Changes
from remat_executor.inspection.labelled_tensors import is_labelled, labels_with
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.pytrees import flatten, unflatten


@attrs.frozen(kw_only=True)
class TraceResult:
    """What one traced run of the module's forward records.

    Attributes:
        spec: structure of the output.
        requires_grad: per output tensor whether the original's does.
        differentiated: indices of the output tensors that get gradients.
        constants: per flat output the constant that it is; None for a tensor.
        is_tensor: per flat output whether it is a tensor.
        replaced: indices into `Tensors.flat` of tensors in plain attributes that the forward replaced.
        changes: what the forward assigned on its modules.
    """

    spec: Any
    requires_grad: tuple[bool, ...]
    differentiated: frozenset[int]
    constants: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    replaced: frozenset[int]
    changes: Changes


IsStandard = Callable[[Any, Any], bool]
"""Whether an output, given with its structure, is of the kind that the module itself returns."""


def always_standard(output: Any, spec: Any) -> bool:
    """That it is."""
    return True


class TracedStep(nn.Module):
    """The module as a function of flat tensors; records the structure of its output in `result`."""

    def __init__(
        self,
        module: nn.Module,
        tensors: Tensors,
        differentiate: Iterable[int] | None,
        call: Callable[..., Any],
        is_standard: IsStandard = always_standard,
        absent: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList()
        for _, parameter in tensors.parameters:
            self.parameters_.append(parameter)
        self.buffers_ = nn.Module()
        for i, (_, buffer) in enumerate(tensors.buffers):
            self.buffers_.register_buffer(str(i), buffer)
        # In the instance's dict, hidden from nn.Module: its parameters are those above.
        self.__dict__.update(_original=module, _tensors=tensors, _call=call, _is_standard=is_standard)
        self.__dict__["_absent"] = absent
        self.__dict__["_differentiate"] = None if differentiate is None else set(differentiate)
        self.result: TraceResult | None = None

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Call the original with flat tensors instead of its own, and record the result.

        Raises:
            CaptureError: the original has a side effect that a captured graph would not repeat.
        """
        tensors: Tensors = self.__dict__["_tensors"]
        flat = (
            *self.parameters_,
            *(self.buffers_.get_buffer(str(i)) for i in range(len(tensors.buffers))),
            *inputs,
        )
        held = {id(slot.holder[slot.key]): flat[slot.place] for slot in tensors.slots}
        for (_, parameter), substitute in zip(tensors.parameters, flat, strict=False):
            if is_labelled(parameter):
                vars(substitute).update(labels_with(parameter, held))
        owned = [names for names, _ in (*tensors.parameters, *tensors.buffers)]
        substitutes = {name: tensor for names, tensor in zip(owned, flat, strict=False) for name in names}
        leaves = tensors.filled_leaves(inputs)
        for i in tensors.numbers:
            leaves[i] = NumberInput(leaves[i])
        args, kwargs = unflatten(leaves, tensors.spec)
        in_slots = [flat[slot.place] for slot in tensors.slots]
        guard = SideEffectGuard(self.__dict__["_original"], substitutes, in_slots, self.__dict__["_call"])
        named = {f"original.{name}": tensor for name, tensor in substitutes.items()}
        user_error = False
        absent: torch.device | None = self.__dict__["_absent"]
        seen: AbstractContextManager[Any] = nullcontext() if absent is None else SeenDevice(absent)
        try:
            with seen, ConstantBranches(), LayerRecorder(tensors.modules):
                output = torch.func.functional_call(guard, named, (tensors, *args), kwargs, tie_weights=False)
        except Exception as error:
            user_error = guard.caused(error)
            if not user_error:
                raise
        if user_error:
            raise guard.take_error()  # outside of the handler, so that the other error is not its context
        leaves, spec = flatten(output)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        requires = [leaf.requires_grad for leaf in found]
        wanted: set[int] | None = self.__dict__["_differentiate"]
        _check_choice(wanted, requires, (leaf for leaf in leaves if not isinstance(leaf, Tensor)))
        standard = self.__dict__["_is_standard"](output, spec)
        chosen = default_choice(found, standard) if wanted is None else wanted
        self.result = TraceResult(
            spec=spec,
            requires_grad=tuple(requires),
            differentiated=frozenset(chosen),
            constants=tuple(None if isinstance(leaf, Tensor) else _remade(leaf) for leaf in leaves),
            is_tensor=tuple(isinstance(leaf, Tensor) for leaf in leaves),
            replaced=frozenset(guard.replaced),
            changes=guard.changes,
        )
        return [
            leaf.detach() if needs and i not in chosen else leaf
            for i, (leaf, needs) in enumerate(zip(found, requires, strict=True))
        ]


@attrs.frozen
class UnavailableOutput:
    """Placeholder of an output object that a captured graph cannot reproduce."""

    type_name: str

    def __getattr__(self, name: str) -> Any:
        """Raise for every attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnplannedUse(
            problem=f"a planned module does not return its {self.type_name}",
            advice="turn it off (for example use_cache=False) or use the original, at `.module`",
        )


def _remade(leaf: Any) -> Any:
    """An output that is not a tensor: a constant of the step, or a placeholder for another object."""
    plain = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
    return leaf if isinstance(leaf, plain) else UnavailableOutput(type(leaf).__name__)


def _check_choice(wanted: set[int] | None, requires: list[bool], others: Iterable[Any]) -> None:
    if not any(requires):
        opaque = sorted({type(o).__name__ for o in others if isinstance(_remade(o), UnavailableOutput)})
        unread = f" ({', '.join(opaque)} is not searched)" if opaque else ""
        raise NothingToDifferentiate(
            problem=f"the model returns no tensor that requires a gradient{unread}",
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


def default_choice(outputs: list[Tensor], standard: bool = True) -> set[int]:
    """Indices of the outputs to differentiate: a scalar in front is a loss and the only one, otherwise all.

    An output that is not of the model's `standard` structure comes from a trainer: all of it counts.
    """
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    if standard and differentiable and outputs[differentiable[0]].ndim == 0:
        return {differentiable[0]}
    return set(differentiable)
