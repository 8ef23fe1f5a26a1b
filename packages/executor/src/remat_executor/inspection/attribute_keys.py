"""Hashable keys of a module's plain attributes, which change when a forward could notice a change.

Plain values are compared by value, functions by identity and closure, containers and objects by class and
contents: a config that holds a dict of numbers, a strategy object. `object_contents` limits depth and size: a
module that refers to its trainer must not make each call walk through a data set.
"""

from collections.abc import Iterable, Set
from enum import Enum
from typing import Any

from torch import Tensor, nn

from remat_executor.inspection.object_contents import DEEPEST, PLAIN, Identity, TraversalLimit, contents_of
from remat_executor.inspection.reads import Reads
from remat_executor.inspection.tensors import REGISTRIES

MARKS = frozenset(
    {"_is_fsdp_managed_module", "_fsdp_use_orig_params", "_is_torch_compile", "_compiled_call_impl"}
)
"""Attributes that `fully_shard` and `torch.compile` set on modules; no forward reads them."""

MARK = "__composable_api_state_key"
"""Prefix of the attributes in which `fully_shard` keeps its state."""

_SIMPLE = frozenset((type(None), bool, int, str))  # types of PLAIN whose values `==` tells apart


def exact_key(value: Any) -> tuple[Any, ...]:
    """A key that distinguishes True from 1 and 0.0 from -0.0, and in which a NaN equals itself."""
    if isinstance(value, float):
        return (type(value), value.hex())
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    return (type(value), value if isinstance(value, PLAIN) else Identity(value))


def attribute_keys(modules: Iterable[nn.Module], limit: TraversalLimit | None = None) -> tuple[Any, ...]:
    """(attribute, key) of the plain attributes of these modules; hashable.

    `limit` says which attributes are read, and records what is read.
    """
    limit = limit or TraversalLimit()
    return tuple(
        (name, key_of(value, limit))
        for module in modules
        for name, value in module.__dict__.items()
        if is_guarded(module, name, limit.reads) and not issubclass(type(value), Tensor)
    )


def is_guarded(module: nn.Module, name: str, reads: Reads) -> bool:
    """Whether a step depends on a plain attribute of a module."""
    if name in REGISTRIES or name in MARKS or name.startswith(MARK):
        return False
    # Capture may have been given the function that was in the module's dict, and not look it up.
    return name == "forward" or reads.include(type(module), name)


def key_of(value: Any, limit: TraversalLimit | None = None, levels: int = DEEPEST) -> Any:
    """A hashable key that changes when a reader of the value, at most `levels` deep, could notice."""
    limit = limit or TraversalLimit()
    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value)
    if kind is tuple and _SIMPLE.issuperset(kinds := tuple(map(type, value))):
        return (kinds, value)  # a stride, a padding: most of what modules hold
    if issubclass(kind, PLAIN):
        return exact_key(value)
    if issubclass(kind, Tensor):
        return Tensor  # an input of the graph, guarded as such
    if issubclass(kind, Enum):
        return Identity(value)
    if not limit.enter(value, levels):
        return kind  # its parts are in the key of its first occurrence
    found = contents_of(value, limit) if levels else None
    if found is None:
        if not issubclass(kind, dict | list | Set):
            return Identity(value)
        limit.counted.append(value)
        return (Identity(value), len(value))
    mark = Identity(value) if callable(value) else kind
    if found.kind == "numbers":
        return (mark, found.parts[0][1])
    keys = ((_name(name), key_of(inner, limit, levels - 1)) for name, inner in found.parts)
    return (mark, frozenset(keys)) if issubclass(kind, Set) else (mark, *keys)


def _name(name: Any) -> Any:
    return name if type(name) is str else exact_key(name)
