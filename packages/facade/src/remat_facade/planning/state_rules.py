"""Bytes of an optimizer's states for one parameter, by the rules of `torch.optim`; imports no torch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from remat_facade.errors import UnknownOptimizer

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[["Tensor"], int]
"""The bytes of state for a parameter."""


def optimizer_names() -> tuple[str, ...]:
    """The names of the optimizers with a rule for their states."""
    return tuple(sorted(_RULES))


def rule_of(name: object) -> Rule:
    """The rule of an optimizer.

    Raises:
        UnknownOptimizer: there is no rule for this optimizer.
    """
    if not isinstance(name, str) or name not in _RULES:
        given = name if isinstance(name, str) else type(name).__name__
        if isinstance(name, type):
            given = f"class {name.__name__}"
        raise UnknownOptimizer(name=given, known=optimizer_names())
    return _RULES[name]


def _copies(count: int, *, steps: bool = True) -> Rule:
    """A rule: `count` tensors like the parameter, and a float32 step count."""
    return lambda p: count * p.numel() * p.element_size() + (4 if steps else 0)


def _adafactor(p: "Tensor") -> int:
    """Row and column second moments of a matrix, full second moments of a vector, and a step count."""
    if p.dim() < 2:
        return p.numel() * p.element_size() + 4
    rows, columns = p.numel() // p.shape[-1], p.numel() // p.shape[-2]
    return (rows + columns) * p.element_size() + 4


_RULES: Mapping[str, Rule] = {
    "none": lambda p: 0,
    "sgd": lambda p: 0,
    "sgd-momentum": _copies(1, steps=False),
    "adam": _copies(2),
    "adamw": _copies(2),
    "adam-amsgrad": _copies(3),
    "adamw-amsgrad": _copies(3),
    "nadam": lambda p: _copies(2)(p) + 4,  # and a running product
    "radam": _copies(2),
    "adamax": _copies(2),
    "rmsprop": _copies(1),
    "adagrad": _copies(1),
    "adafactor": _adafactor,
}
