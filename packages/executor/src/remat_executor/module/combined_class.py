"""The class of a planned module: ours and the original's in one.

Programs ask a model for its class: whether it is a `PreTrainedModel`, what it is called, which inputs its
forward names. So a planned module is of a class that has both, as `fully_shard` makes one, and methods of the
original's class run on the planned module.

Where the original has an attribute of a name that is ours, `plan` say, its methods would find ours: then
they are the original's own, bound to it. They call it without a plan, which is counted and said.
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
    """A class that is `cls` and the model's; where that fails, `cls` that passes special methods on."""
    kind = type(model)
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # What the class is called for makes another of the original's: a slice of a `Sequential`, say.
        "__new__": staticmethod(lambda _, *args, **kwargs: kind(*args, **kwargs)),
    }
    if kind.__call__ is not nn.Module.__call__:
        body["__call__"] = lambda self, *args, **kwargs: self.forward(*args, **kwargs)  # which calls theirs
    ours = _own_names(cls.__mro__[: cls.__mro__.index(nn.Module)])
    theirs = _own_names(kind.__mro__[: kind.__mro__.index(nn.Module)])
    held = {*model.__dict__, *dir(model)}
    if ours & (theirs | held):
        body |= {name: _Original(kind, name) for name in theirs - ours}
    try:
        return types.new_class(kind.__name__, (cls, kind), exec_body=lambda namespace: namespace.update(body))
    except Exception as error:  # noqa: BLE001 - whatever a metaclass or `__init_subclass__` raises
        problem = f"that class cannot be a base of another ({text_of(error)})"
        warn(f"the planned module is no {kind.__name__}: {problem}")
        return type(cls.__name__, (cls,), {"__module__": cls.__module__} | _special_methods(kind, cls))


def _own_names(kinds: Iterable[type]) -> set[str]:
    """What these classes have that every module has not, but for methods that Python calls by itself."""
    found = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    return found - set(dir(nn.Module))


def _special_methods(kind: type, cls: type) -> dict[str, Any]:
    """Indexing, a length and whatever else Python looks for in the class: passed on to the original."""

    def passed_on(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(self._remat.original, name)(*args, **kwargs)

    of_every_class = {*dir(cls), *dir(object)}
    return {
        name: passed_on(name)
        for base in kind.__mro__
        for name, held in vars(base).items()
        if name.startswith("__") and name not in of_every_class and isinstance(held, types.FunctionType)
    }


class _Original:
    """An attribute of the original's class, as the original has it."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __get__(self, module: Any, owner: Any) -> Any:
        return getattr(self.kind, self.name) if module is None else attribute_of(module._remat, self.name)

    def __set__(self, module: Any, value: Any) -> None:
        setattr(module._remat.original, self.name, value)

    def __delete__(self, module: Any) -> None:
        delattr(module._remat.original, self.name)


def attribute_of(manager: Any, name: str) -> Any:
    """An attribute of the original; its methods tell when they call it."""
    found = getattr(manager.original, name)
    if isinstance(found, types.MethodType) and found.__self__ is manager.original:
        return _counting(manager, found)
    return found


def _counting(manager: Any, method: Any) -> Any:
    """A method of the original's, which calls the original: without a plan, so that is counted."""
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
            while pending:  # a hook of somebody's may have raised in between
                pending.pop().close()

    return counted
