"""Let a trace take the branches that depend on constants alone, as eager does.

Fake tensors have no values, so a trace stops at `if (positions.diff() == 1).all():`, although nothing there
depends on the model or its inputs. While `ConstantBranches` is active, each tensor that is made of constants
alone remembers the call that made it, and where Python asks for its value those calls run on real tensors.
Only integers and booleans are followed: with them the CPU computes what any device computes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.torch_private.dispatch import outside_of_modes
from remat_executor.torch_private.pytrees import flatten, unflatten

_MOST_ELEMENTS = 1 << 24
_PLAIN: tuple[type, ...] = (
    *(type(None), type(...), bool, int, float, complex, str, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_VALUES = frozenset(
    {
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__),
        *(Tensor.item, Tensor.is_nonzero, Tensor.equal, torch.is_nonzero, torch.equal),
    }
)
"""Functions that turn tensors into Python values."""


@attrs.frozen(kw_only=True, eq=False)
class _Made:
    """How a tensor was made."""

    tensor: Tensor  # held, so that its id stays its own
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | None  # among several results


class _NotConstant(Exception):
    """The value cannot be found without the model."""


class ConstantBranches(TorchFunctionMode):
    """While active, tensors made of constants alone can be asked for their values."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, _Made] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call; answer from real values if it asks for one that depends on constants alone."""
        kwargs = kwargs or {}
        leaves = flatten((args, dict(kwargs)))[0]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constant = all(id(tensor) in self._made for tensor in given)
        if func in _VALUES and constant:
            try:
                return self._value(func, args, kwargs)
            except _NotConstant:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _writes(func, kwargs):
            # Views of what is written change too; such code is rare, so all is forgotten.
            self._made.clear()
        elif constant and all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self._remember(func, args, kwargs, result)
        return result

    def _remember(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        several = isinstance(result, tuple | list)
        for place, tensor in enumerate(result if several else (result,)):
            if isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex():
                self._made[id(tensor)] = _Made(
                    tensor=tensor, func=func, args=args, kwargs=kwargs, place=place if several else None
                )

    def _value(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            with outside_of_modes(), torch.device("cpu"), torch.no_grad(), _Repeatable():  # type: ignore[no-untyped-call]
                return self._called(func, args, kwargs, {})
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise _NotConstant from error

    def _called(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: dict[int, Any]
    ) -> Any:
        leaves, spec = flatten((args, dict(kwargs)))
        there = [self._real(leaf, known) if isinstance(leaf, Tensor) else _on_cpu(leaf) for leaf in leaves]
        real_args, real_kwargs = unflatten(there, spec)
        return func(*real_args, **real_kwargs)

    def _real(self, tensor: Tensor, known: dict[int, Any]) -> Tensor:
        if id(tensor) not in known:
            made = self._made[id(tensor)]
            if math.prod(tensor.shape) > _MOST_ELEMENTS:
                raise _NotConstant
            result = self._called(made.func, made.args, made.kwargs, known)
            real = result if made.place is None else result[made.place]
            if (real.shape, real.dtype) != (tensor.shape, tensor.dtype):
                raise _NotConstant  # it was made under other defaults
            known[id(tensor)] = real
        found: Tensor = known[id(tensor)]
        return found


class _Repeatable(TorchDispatchMode):
    """Refuses what gives other numbers at each run: draws, and memory that nothing has written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__:
            raise _NotConstant
        return func(*args, **(kwargs or {}))


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = (
        in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__index__")
    )
    return in_place or kwargs.get("out") is not None


def _on_cpu(leaf: Any) -> Any:
    """An argument of a call that shall run on the CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    accelerator = isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "xpu", "mps", "hpu", "npu")
    return "cpu" if accelerator else leaf
