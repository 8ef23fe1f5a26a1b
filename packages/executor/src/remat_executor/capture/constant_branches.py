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

from remat_executor.torch_private.dispatch import is_mutable, outside_of_modes
from remat_executor.torch_private.pytrees import flatten, unflatten

_MOST_ELEMENTS = 1 << 24
_KEPT_NBYTES = 1 << 14
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
_DETACHES = (Tensor.data.__get__,)  # type: ignore[attr-defined]
"""Functions that give memory a second name whose writes the versions of the first do not count."""


@attrs.define(kw_only=True, eq=False)
class _Made:
    """How a tensor was made, with copies of the containers among the arguments."""

    tensor: Tensor  # held, so that its id stays its own
    version: int  # of the tensor; writes into it and into other views of its memory count it up
    func: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    place: int | None  # among several results
    number: int  # tensors are made after those that they are made of
    real: Tensor | None = None  # kept if it is small: a loop may ask for it repeatedly


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
        leaves, spec = flatten((args, dict(kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func in _DETACHES:
            self._made.clear()  # writes by the other name would not be seen
        if func in _VALUES and all(map(self._is_known, given)):
            try:
                return self._value(func, leaves, spec)
            except _NotConstant:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _writes_unseen(func):
            self._made.clear()
        # It has written none of its arguments if they are still known.
        elif all(map(self._is_known, given)) and all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self._remember(func, leaves, spec, result)
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made.version == tensor._version

    def _remember(self, func: Any, leaves: list[Any], spec: Any, result: Any) -> None:
        several = isinstance(result, tuple | list)
        for place, tensor in enumerate(result if several else (result,)):
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
                continue
            # An argument that is returned as it is has been made before; inference tensors count no writes.
            if id(tensor) in self._made or tensor.is_inference() or tensor.is_meta:
                continue
            self._made[id(tensor)] = _Made(
                tensor=tensor,
                version=tensor._version,
                func=func,
                leaves=leaves,
                spec=spec,
                place=place if several else None,
                number=len(self._made),
            )

    def _value(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        try:
            with outside_of_modes(), torch.no_grad(), _Repeatable():  # type: ignore[no-untyped-call]
                return _called(func, leaves, spec, self._real_tensors(leaves))
        except Exception as error:
            raise _NotConstant from error

    def _real_tensors(self, leaves: list[Any]) -> dict[int, Tensor]:
        """The values of the tensors among these leaves, and of those that they are made of, by their ids."""
        needed: dict[int, _Made] = {}
        pending = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        while pending:  # no recursion: a loop of the model may make a long chain
            tensor = pending.pop()
            if id(tensor) in needed:
                continue
            if not self._is_known(tensor) or math.prod(tensor.shape) > _MOST_ELEMENTS:
                raise _NotConstant
            made = needed[id(tensor)] = self._made[id(tensor)]
            if made.real is None:
                pending += [leaf for leaf in made.leaves if isinstance(leaf, Tensor)]
        known: dict[int, Tensor] = {}
        for made in sorted(needed.values(), key=lambda made: made.number):
            known[id(made.tensor)] = made.real if made.real is not None else _remade(made, known)
        return known


def _remade(made: _Made, known: Mapping[int, Tensor]) -> Tensor:
    result = _called(made.func, made.leaves, made.spec, known)
    real: Tensor = result if made.place is None else result[made.place]
    if (real.shape, real.dtype) != (made.tensor.shape, made.tensor.dtype):
        raise _NotConstant  # it was made under other defaults
    if real.untyped_storage().nbytes() <= _KEPT_NBYTES:
        made.real = real
    return real


def _called(func: Any, leaves: list[Any], spec: Any, known: Mapping[int, Tensor]) -> Any:
    there = [known[id(leaf)] if isinstance(leaf, Tensor) else _on_cpu(leaf) for leaf in leaves]
    args, kwargs = unflatten(there, spec)
    return func(*args, **kwargs)


class _Repeatable(TorchDispatchMode):
    """Refuses what gives other numbers at each run: draws, and memory that nothing has written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__:
            raise _NotConstant
        return func(*args, **(kwargs or {}))


def _writes_unseen(func: Any) -> bool:
    """Whether a function may write its arguments without counting up their versions."""
    name = getattr(func, "__name__", "")
    of_lists = name.startswith("_") and name.endswith("_") and not name.endswith("__")  # `_foreach_add_`
    return of_lists or is_mutable(func)


def _on_cpu(leaf: Any) -> Any:
    """An argument of a call that shall run on the CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    accelerator = isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "xpu", "mps", "hpu", "npu")
    return "cpu" if accelerator else leaf
