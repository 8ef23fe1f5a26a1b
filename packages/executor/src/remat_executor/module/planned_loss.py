"""Take the caller's loss function into the plan of a model that is planned in place.

The model's forward gets one more keyword, ``target``: a call with it returns the loss of the output, computed
inside of the planned step. A call without it returns the output. It is assigned to the forward as a trainer
would do it: the model's class, attributes and state dict are unchanged.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from remat_executor.errors import BadInput
from remat_executor.module.forward_binding import ForwardBinding, takes
from remat_executor.module.forward_descriptor import NOTHING
from remat_executor.module.in_place import InPlaceState, state_of
from remat_graph.errors import shown

LossFunction = Callable[[Any, Any], Tensor]
"""Called with the output of the model and the target."""


class LossForward(functools.partial[Any]):
    """The forward of a module with the keyword ``target``."""

    must_be_planned = True

    @property
    def __signature__(self) -> inspect.Signature:
        shown = inspect.signature(_binding(self.args[0]).shown(_binding(self.args[0]).first))
        parameters = list(shown.parameters.values())
        target = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY, default=None)
        named = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
        return inspect.Signature([*parameters[:named], target, *parameters[named:]])


def plan_loss(model: nn.Module, loss: LossFunction) -> None:
    """Add the keyword ``target`` to the forward of a module that is planned in place.

    Raises:
        BadInput: see `check_loss`.
    """
    _binding(model).assigned = LossForward(_forward_or_loss, model, loss)


def leave_loss(state: InPlaceState) -> None:
    """Remove what `plan_loss` added, if nothing else was assigned since."""
    if isinstance(state.binding.assigned, LossForward):
        state.binding.assigned = NOTHING


def check_loss(model: nn.Module, loss: object) -> None:
    """Check a loss function before anything is changed.

    Raises:
        BadInput: it cannot be called, has tensors of its own, or the model has an input ``target``.
    """
    if not callable(loss) or isinstance(loss, type):
        raise BadInput(
            problem=f"loss is {shown(loss)}, not a function of an output and a target",
            advice="give a function or a module such as nn.CrossEntropyLoss()",
        )
    if isinstance(loss, nn.Module) and (held := [*loss.state_dict(), *dict(loss.named_buffers())]):
        raise BadInput(
            problem=f"the loss, a {type(loss).__name__}, has tensors of its own ({held[0]})",
            advice="make one module of model and loss, and limit that",
        )
    if "target" in inspect.signature(model.forward).parameters:
        raise BadInput(
            problem=f"the forward of the {type(model).__name__} has an input named target, which loss= adds",
            advice="make one module of model and loss, and limit that",
        )


def _forward_or_loss(
    model: nn.Module, loss: LossFunction, /, *args: Any, target: Any = None, **kwargs: Any
) -> Any:
    binding = _binding(model)
    forward = binding.resolved(binding.first)
    try:
        output = forward(*args, **kwargs)
    except TypeError as error:
        if target is None and not takes(forward, args, kwargs):
            error.add_note("the target of the loss has a name: model(x, target=y)")
        raise
    if target is None:
        return output
    found = loss(output, target)
    if not isinstance(found, Tensor):
        raise BadInput(
            problem=f"the loss function returned a {type(found).__name__}, not a tensor",
            advice="return the loss alone",
        )
    return found


def _binding(model: nn.Module) -> ForwardBinding:
    state = state_of(model)
    assert state is not None
    return state.binding
