"""Parameters whose update is still under way on the CPU: whoever touches one waits for it.

``optimizer.step()`` returns before the CPU is done, so that the next forward can begin. Until then a
parameter is of a class of its own here: any operator or attribute that is asked of it first waits for its
update, and then finds an ordinary parameter, the same object. Who stops waiting, by Ctrl-C say, leaves it in
flight. What the engine itself reads, it reads past this.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from remat_executor.torch_private.tensors import past_torch_function
from remat_offload.host_memory.pool import Event

_WAIT = "_remat_wait"


class PendingParameter(nn.Parameter):
    """A parameter that is being updated."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for every such parameter among the arguments, then do what was asked."""
        kwargs = kwargs or {}
        for parameter in _among((args, kwargs)):
            parameter._wait_for_update()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary one's: torch asks a parameter for its class before it reads it."""
        return self._wait_for_update().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Likewise, and for its attributes."""
        return self._wait_for_update().__reduce_ex__(protocol)

    def _wait_for_update(self) -> nn.Parameter:
        work: Event | None = self.__dict__.get(_WAIT)
        if work is not None:
            try:
                work.synchronize()
            finally:
                if work.query():  # well or badly; else nobody has waited to the end
                    clear_pending(self)
        return self


def mark_pending(parameter: nn.Parameter, work: Event) -> None:
    """Let whoever touches the parameter wait first.

    Args:
        parameter: the parameter.
        work: what is waited for: its update.
    """
    parameter.__dict__[_WAIT] = work
    parameter.__class__ = PendingParameter


def clear_pending(parameter: nn.Parameter) -> None:
    """Make it an ordinary parameter again, whether or not its update is done."""
    if type(parameter) is PendingParameter:
        setattr(parameter, "__class__", nn.Parameter)  # noqa: B010 - mypy holds the class for fixed
        parameter.__dict__.pop(_WAIT, None)


def drop_gradient(parameter: nn.Parameter) -> None:
    """Set ``.grad`` to None without waiting."""
    with past_torch_function():
        parameter.grad = None


def _among(value: Any) -> Iterable[PendingParameter]:
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _among(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _among(item)
