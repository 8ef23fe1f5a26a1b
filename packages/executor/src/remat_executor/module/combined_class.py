"""The class of a planned module, derived from `PlannedModule` and from the original's class.

Programs inspect a model's class: whether it is a `PreTrainedModel`, its name, the inputs that its forward
names. So a planned module's class derives from both, as `fully_shard` does it, and methods of the original's
class run on the planned module.

Where the original has an attribute of the same name as `PlannedModule`, `plan` say, methods of the original
would find the wrong one. Then they are the original's own, bound to it; a method that calls `forward` runs
unplanned, and the call is counted in `runs` and warned once.
"""

import contextlib
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from remat_executor.errors import warn
from remat_graph.errors import text_of


def class_for(cls: type, model: nn.Module) -> type:
    """A class derived from `cls` and the model's; if that fails, `cls` with forwarded special methods."""
    kind = type(model)
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # The class is called to make another original, for a slice of a `Sequential` say.
        "__new__": staticmethod(lambda _, *args, **kwargs: kind(*args, **kwargs)),
    }
    if kind.__call__ is not nn.Module.__call__:
        # The forward calls the original's `__call__`.
        body["__call__"] = lambda self, *args, **kwargs: self.forward(*args, **kwargs)
    ours = _own_names(cls.__mro__[: cls.__mro__.index(nn.Module)])
    theirs = _own_names(kind.__mro__[: kind.__mro__.index(nn.Module)])
    existing = {*model.__dict__, *dir(model)}
    if ours & (theirs | existing):
        body |= {name: _Original(kind, name) for name in theirs - ours}
    try:
        return types.new_class(kind.__name__, (cls, kind), exec_body=lambda namespace: namespace.update(body))
    except Exception as error:  # noqa: BLE001 - whatever a metaclass or `__init_subclass__` raises
        problem = f"that class cannot be a base of another ({text_of(error)})"
        warn(f"the planned module is no {kind.__name__}: {problem}")
        return type(cls.__name__, (cls,), {"__module__": cls.__module__} | _special_methods(kind, cls))


def _own_names(kinds: Iterable[type]) -> set[str]:
    """Names defined by these classes and not by `nn.Module`, without special methods."""
    found = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    return found - set(dir(nn.Module))


def _special_methods(kind: type, cls: type) -> dict[str, Any]:
    """Indexing, a length and other methods that Python looks up in the class, forwarded to the original."""

    def forwarded(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(self._remat.original, name)(*args, **kwargs)

    of_every_class = {*dir(cls), *dir(object)}
    return {
        name: forwarded(name)
        for base in kind.__mro__
        for name, member in vars(base).items()
        if name.startswith("__") and name not in of_every_class and isinstance(member, types.FunctionType)
    }


class _Original:
    """A descriptor of an attribute that belongs to the original."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __get__(self, module: Any, owner: Any) -> Any:
        return getattr(self.kind, self.name) if module is None else attribute_of(module._remat, self.name)

    def __set__(self, module: Any, value: Any) -> None:
        setattr(module._remat.original, self.name, value)

    def __delete__(self, module: Any) -> None:
        delattr(module._remat.original, self.name)


def attribute_of(manager: Any, name: str) -> Any:
    """An attribute of the original; calls of the original by its methods are counted."""
    found = getattr(manager.original, name)
    if isinstance(found, types.MethodType) and found.__self__ is manager.original:
        return _counting(manager, found)
    return found


def _counting(manager: Any, method: Any) -> Any:
    """A method of the original that counts its calls of the original, which run without a plan."""
    original: nn.Module = manager.original
    pending: list[contextlib.ExitStack] = []

    def begin(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            manager.count_original(f"its method {method.__name__} calls it")
        pending.append(contextlib.ExitStack())
        pending[-1].enter_context(manager.original_context())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        pending.pop().close()

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        hooks = [
            original.register_forward_pre_hook(begin),
            original.register_forward_hook(end, always_call=True),
        ]
        try:
            return method(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            while pending:  # another hook may have raised in between
                pending.pop().close()

    return counted
