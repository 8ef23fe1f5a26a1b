"""`forward` of a planned module: a bound method with the signature of the original's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Forward:
    """A `forward` that trainers can ask for the inputs that it names: they drop the others."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return self.function
        return BoundForward(module.__dict__["_remat"].forward or self.function, module)


class BoundForward(functools.partial[Any]):
    """As a bound method, which cannot have a signature of its own."""

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.module.forward)
