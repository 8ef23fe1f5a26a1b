"""A pending parameter is one whose update still runs on the CPU: the first access waits for the update.

``optimizer.step()`` returns before the CPU is done, so that the next forward can begin. Until the update is
done the parameter's class is `PendingParameter`: any operator or attribute access first waits, and then finds
an ordinary parameter, the same object. If the wait is interrupted, by Ctrl-C for example, the parameter stays
pending. The engine itself bypasses this class.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from remat_executor.torch_private.tensors import past_torch_function
from remat_offload.host_memory.pool import Event

_WAIT = "_remat_wait"


class PendingParameter(nn.Parameter):
    """A parameter that is being updated."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for every pending parameter among the arguments, then call the function."""
        kwargs = kwargs or {}
        for parameter in _pending_in((args, kwargs)):
            parameter._wait_for_update()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait here: torch reads the class of a parameter before the parameter."""
        return self._wait_for_update().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait here: torch reads the class and the attributes of a parameter before the parameter."""
        return self._wait_for_update().__reduce_ex__(protocol)

    def _wait_for_update(self) -> nn.Parameter:
        work: Event | None = self.__dict__.get(_WAIT)
        if work is not None:
            try:
                work.synchronize()
            finally:
                if work.query():  # done or failed; otherwise the wait was interrupted
                    clear_pending(self)
        return self


def mark_pending(parameter: nn.Parameter, work: Event) -> None:
    """Make every access to the parameter wait for the work, its update, first."""
    parameter.__dict__[_WAIT] = work
    parameter.__class__ = PendingParameter


def clear_pending(parameter: nn.Parameter) -> None:
    """Make the parameter ordinary again, whether or not its update is done."""
    if type(parameter) is PendingParameter:
        setattr(parameter, "__class__", nn.Parameter)  # noqa: B010 - mypy takes the class as fixed
        parameter.__dict__.pop(_WAIT, None)


def pending_work(parameter: nn.Parameter) -> Event | None:
    """What a reader of the parameter waits for; None if it is ordinary."""
    work: Event | None = parameter.__dict__.get(_WAIT)
    return work


def drop_gradient(parameter: nn.Parameter) -> None:
    """Set ``.grad`` to None without waiting."""
    with past_torch_function():
        parameter.grad = None


def _pending_in(value: Any) -> Iterable[PendingParameter]:
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _pending_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pending_in(item)
