"""Find the packages that put functions of their own in place of the forwards of a module's classes."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def replacing_packages(module: nn.Module, target: Callable[..., Any] | None = None) -> frozenset[str]:
    """Top-level packages of the functions in place of forwards, without those that the classes come from.

    Mixed precision wraps a forward, and a trainer may install one of its own. Both have the name of the
    method that they replace, so the namespaces in which the functions run are read, along `__wrapped__`.

    Args:
        module: the module; the forwards of its submodules count too.
        target: a function that is called instead of the module's forward.
    """
    modules = list(module.modules())
    replaced = [target, *(vars(submodule).get("forward") for submodule in modules)]
    functions = [function for each in replaced if each is not None for function in _wrapped(each)]
    if not functions:
        return frozenset()
    own = {_top(base.__module__) for kind in set(map(type, modules)) for base in kind.__mro__}
    return frozenset(_package(function) for function in functions) - own


def is_made_by(output: Any, packages: frozenset[str]) -> bool:
    """Whether the type of an output belongs to one of these packages."""
    return _top(type(output).__module__) in packages


def _wrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _package(function: Any) -> str:
    namespace = getattr(function, "__globals__", None)
    return _top((namespace or {}).get("__name__") or getattr(function, "__module__", None) or "")


def _top(name: str) -> str:
    return name.partition(".")[0]
