"""Ask the original model whether it raises by itself what stopped a capture.

A trace fails for two reasons: the model cannot be called in this way at all (a sample of a wrong width, a
`raise` of the user's), or capture cannot do what the model does (a branch on data, numpy). The exception does
not tell them apart: fake tensors have messages and types of their own, and user code that meets one may raise
anything. So the forward is run once more, on real tensors, only after a capture has failed. What it raises
is the user's error, with the type, arguments and traceback that it has without remat.

Nothing of the user's changes: buffers, inputs and tensors in attributes are copies, a write into a parameter
ends the run, attributes and generators are put back. Gradients are on, since some errors need them, but what
autograd saves is dropped at once: the run holds what inference holds. That is outside of the budget. No
answer comes where the tensors have no values here (the meta device, parameters on another device), where
memory runs out, and where the forward does what no graph can do.
"""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.capture.side_effects import only_torch_randomness
from remat_executor.errors import CaptureError
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.fake_tensors import has_no_values
from remat_executor.torch_private.pytrees import flatten
from remat_executor.torch_private.tensors import is_out_of_memory, storage_id
from remat_graph.errors import text_of


@attrs.frozen(kw_only=True, eq=False)
class OriginalOutcome:
    """How a call of the original ends.

    Attributes:
        error: what it raises.
        runs: it raises nothing; False if `error` says what, or if nobody knows.
    """

    error: Exception | None = None
    runs: bool = False


def run_original(forward: Callable[[Tensors], object], tensors: Tensors) -> OriginalOutcome:
    """Run a forward that writes into nothing of the user's.

    Args:
        forward: calls the original, under watch, with these tensors in the place of its own.
        tensors: the module's and the call's.
    """
    if any(map(has_no_values, tensors.flat)):
        return OriginalOutcome()
    if len({t.device for t in tensors.flat if t.ndim}) > 1:  # some are at home elsewhere
        return OriginalOutcome()
    parameters = [parameter for _, parameter in tensors.parameters]
    dropped = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            only_torch_randomness(tensors),
            dropped,
            _NoWrites(parameters),
        ):
            forward(_with_copies(tensors))
    except CaptureError:
        return OriginalOutcome()
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        # Transforms of torch.func do not take the hooks that drop what is saved.
        ours = is_out_of_memory(error) or "saved tensor" in text_of(error)
        return OriginalOutcome() if ours else OriginalOutcome(error=error)
    return OriginalOutcome(runs=True)


def _no_backward(_: object) -> NoReturn:
    raise CaptureError(problem="the forward runs a backward", advice="do that outside of it")


def _with_copies(tensors: Tensors) -> Tensors:
    """The same call with copies of all that a forward may write into."""
    owned = attrs.evolve(
        tensors.owned, buffers=tuple((names, buffer.detach().clone()) for names, buffer in tensors.buffers)
    )
    arguments, held = (tuple(map(_copy, given)) for given in (tensors.arguments, tensors.held))
    return attrs.evolve(tensors, owned=owned, arguments=arguments, held=held)


def _copy(tensor: Tensor) -> Tensor:
    """A leaf if it is one: torch lets what is none be written in place."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if tensor.is_leaf else start.clone()


class _NoWrites(TorchDispatchMode):
    """Ends the run before an operator writes into one of these tensors."""

    supports_higher_order_operators = True

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = {storage_id(t) for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        arguments = getattr(getattr(func, "_schema", None), "arguments", ())
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        given = [*args, *(named.get(a.name) for a in arguments[len(args) :])]
        targets = flatten([a for a, is_written in zip(given, written, strict=False) if is_written])[0]
        if any(isinstance(t, Tensor) and storage_id(t) in self.kept for t in targets):
            raise CaptureError(problem="the forward writes into a parameter", advice="do that outside of it")
        return func(*args, **named)
