"""Find out whether the original model itself raises the error that stopped a capture.

A trace fails for two reasons: the model does not accept the call (a sample of a wrong width, a user's
`raise`), or capture does not support what the model does (a branch on data, numpy). The exception does not
show which: fake tensors have messages and types of their own, and user code may react to them in any way. So
after a failed capture the forward runs once more, on real tensors. An error that it raises is the user's,
with the type, arguments and traceback that it has without remat.

The run changes nothing of the user's: buffers, inputs and tensors in attributes are copies, a write into a
parameter ends the run, attributes and generators are restored. Gradients are on, since some errors need them,
but saved tensors are dropped at once, so the run needs the memory of inference; the budget does not cover it.
The outcome is unknown where tensors have no values (the meta device, parameters on another device), where
memory runs out, and where the forward has effects that capture refuses.
"""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.capture.random_draws import with_torch_randomness_only
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
        error: the error that it raises.
        runs: whether it is known to raise nothing; False with an `error` or if the outcome is unknown.
    """

    error: Exception | None = None
    runs: bool = False


def run_original(forward: Callable[[Tensors], object], tensors: Tensors) -> OriginalOutcome:
    """Run the original by `forward(tensors)` without writing into the user's tensors."""
    if any(map(has_no_values, tensors.flat)):
        return OriginalOutcome()
    if len({t.device for t in tensors.flat if t.ndim}) > 1:  # some are placed elsewhere
        return OriginalOutcome()
    parameters = [parameter for _, parameter in tensors.parameters]
    dropped = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            dropped,
            _NoWrites(parameters),
        ):
            with_torch_randomness_only(lambda: forward(_with_copies(tensors)), tensors)
    except CaptureError:
        return OriginalOutcome()
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        # Transforms of torch.func do not accept the hooks that drop saved tensors.
        ours = is_out_of_memory(error) or "saved tensor" in text_of(error)
        return OriginalOutcome() if ours else OriginalOutcome(error=error)
    return OriginalOutcome(runs=True)


def _no_backward(_: object) -> NoReturn:
    raise CaptureError(problem="the forward runs a backward", advice="do that outside of it")


def _with_copies(tensors: Tensors) -> Tensors:
    """The same call with copies of all tensors that a forward may write."""
    owned = attrs.evolve(
        tensors.owned, buffers=tuple((names, buffer.detach().clone()) for names, buffer in tensors.buffers)
    )
    arguments, held = (tuple(map(_copy, given)) for given in (tensors.arguments, tensors.held))
    return attrs.evolve(tensors, owned=owned, arguments=arguments, held=held)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, a leaf only if the tensor is one: torch allows in-place writes to the others."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if tensor.is_leaf else start.clone()


class _NoWrites(TorchDispatchMode):
    """Refuses operators that write into one of these tensors."""

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
