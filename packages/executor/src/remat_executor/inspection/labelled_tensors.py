"""Parameters of subclasses that only carry attributes: to a kernel they are plain tensors.

A subclass may change what its tensors do, so only classes that were looked into are accepted. The weights of
bitsandbytes in 4 bits are such a class: in addition to its bytes a weight has a `quant_state` with the
tensors that its kernels need. In a capture a plain tensor with the same attributes stands for the weight.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

LABELLED = frozenset({("bitsandbytes.nn.modules", "Params4bit")})
"""Module and name of the accepted classes. Their names are compared, so that nothing has to be imported."""

_DEEPEST = 3
"""Objects within objects of a label that are searched for tensors: `quant_state.state2.absmax` takes two."""


def is_labelled(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that only carries attributes."""
    kind = type(tensor)
    return kind is not nn.Parameter and (kind.__module__, kind.__qualname__) in LABELLED


def labels(tensor: Tensor) -> dict[str, Any]:
    """The attributes of a labelled tensor but the module that it belongs to."""
    return {name: value for name, value in vars(tensor).items() if not isinstance(value, nn.Module)}


def label_tensors(tensor: Tensor, name: str) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """(name, holder, key, tensor) of the tensors in the objects that label a tensor called `name`."""
    for key, value in labels(tensor).items():
        yield from _tensors_in(value, f"{name}.{key}", _DEEPEST)


def labels_with(tensor: Tensor, others: Mapping[int, Tensor]) -> dict[str, Any]:
    """Labels of a tensor with other tensors in them, by the identity of those that they replace.

    The objects are copies: a backward reads them as well, when the forward's own tensors are back in place.
    """
    return {key: _copied(value, others, _DEEPEST) for key, value in labels(tensor).items()}


def _copied(value: Any, others: Mapping[int, Tensor], levels: int) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    held = _fields(value, levels)
    if held is None:
        return value
    copied = copy.copy(value)
    vars(copied).update({key: _copied(inner, others, levels - 1) for key, inner in held.items()})
    return copied


def _tensors_in(value: Any, name: str, levels: int) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    held = _fields(value, levels) or {}
    for key, inner in held.items():
        if isinstance(inner, Tensor):
            yield f"{name}.{key}", held, key, inner
        else:
            yield from _tensors_in(inner, f"{name}.{key}", levels - 1)


def _fields(value: Any, levels: int) -> dict[str, Any] | None:
    """The attributes of an object of a label; None if it is not searched."""
    held = getattr(value, "__dict__", None)
    return held if levels and type(held) is dict and not callable(value) else None
