"""The descriptor of `forward` on planned modules: what is assigned to `forward` is planned as well.

Programs replace the `forward` of a module: mixed precision wraps it, a trainer installs a function of its
own. So a planned module plans whatever its `forward` is now. A function that was read from `forward` earlier
and is called inside the replacement runs unplanned there; called by itself, it is planned.
"""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from types import MethodType
from typing import Any

ForwardTarget = Callable[..., Any] | None
"""What a `forward` runs: a function, or None for the method of the original's class."""


def must_be_planned(target: ForwardTarget) -> bool:
    """Whether what a forward runs is an error if it cannot be captured, not a reason to run it unplanned."""
    return getattr(target, "must_be_planned", False)


class Nothing(Enum):
    """The type of a sentinel: nothing was assigned."""

    NOTHING = 0


NOTHING = Nothing.NOTHING


class Forward:
    """The descriptor of `forward`; its functions take the planned module first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return self._of_class(owner)
        binding = module._remat.binding
        return BoundForward(binding.runner, module, binding.target())

    def __set__(self, module: Any, forward: Callable[..., Any]) -> None:
        binding = module._remat.binding
        if isinstance(forward, BoundForward) and forward.__self__ is module:
            binding.assign(forward.target)
        elif isinstance(forward, MethodType) and binding.is_first(forward):
            binding.assign(binding.first)
        else:
            binding.assign(forward)

    def __delete__(self, module: Any) -> None:
        module._remat.binding.unassign()

    def _of_class(self, owner: Any) -> Any:
        """The function with the signature of the original's class, which trainers inspect for input names."""
        holders = [vars(kind)["forward"] for kind in owner.__mro__ if "forward" in vars(kind)]
        after = holders[holders.index(self) + 1]

        def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self.function(module, *args, **kwargs)

        return functools.update_wrapper(forward, after)


class BoundForward(functools.partial[Any]):
    """Acts as a bound method; a real one could not have a signature of its own."""

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def target(self) -> ForwardTarget:
        """What it runs."""
        target: ForwardTarget = self.args[1]
        return target

    @property
    def __func__(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.target, "__func__", self.__self__._remat.binding.forward)
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__._remat.binding.shown(self.target))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__self__._remat.binding.shown(self.target), name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundForward):
            return NotImplemented
        return self.__self__ is other.__self__ and self.target == other.target

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.target))
