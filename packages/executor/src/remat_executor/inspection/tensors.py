"""The tensors of a module and of one call, which become the inputs of a captured graph.

Tensors are distinct by identity: a tied parameter is one input, and autograd sums its gradient. In addition
to parameters, buffers and arguments there are tensors in plain attributes that a forward may read, such as a
position table or a list of anchors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from remat_executor.inspection.labelled_tensors import is_labelled, label_tensors
from remat_executor.torch_private.pytrees import flatten, unflatten

REGISTRIES = frozenset(nn.Module().__dict__)
"""The attributes that every module has."""

_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter, nn.Buffer))

NO_NUMBERS: Mapping[Any, frozenset[int]] = MappingProxyType({})

MOST_COUNTED = (1 << 31) - 1
"""A larger whole number is no input: arithmetic with it may leave the 64 bits of a tensor."""

MOST_HELD = 1_000
"""A longer list or dict is not searched for tensors at each call."""


@attrs.frozen(kw_only=True, eq=False)
class Slot:
    """A plain attribute, or a list or dict in one, that holds a tensor: ``holder[key]``."""

    name: str  # its name for messages
    holder: Any  # dict or list
    key: Any  # of the holder
    place: int  # index of the tensor in `Tensors.flat`


@attrs.frozen(kw_only=True, eq=False)
class Owned:
    """The distinct tensors of a module, independent of its calls.

    Attributes:
        modules: every submodule by its name, once; the module itself first.
        parameters: (names, parameter) with every name that reaches it.
        buffers: (names, buffer) likewise.
        plain: (name, holder, key, tensor) of each tensor in a plain attribute.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    parameters: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    buffers: tuple[tuple[tuple[str, ...], Tensor], ...]
    plain: tuple[tuple[str, Any, Any, Tensor], ...]

    @cached_property
    def registered(self) -> tuple[Tensor, ...]:
        """Parameters, then buffers."""
        return tuple(tensor for _, tensor in (*self.parameters, *self.buffers))

    @cached_property
    def registered_ids(self) -> frozenset[int]:
        """The identities of `registered`."""
        return frozenset(map(id, self.registered))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors; those in plain attributes once for each slot."""
        return (*self.registered, *(t for _, _, _, t in self.plain))

    @property
    def unlabelled(self) -> tuple[Tensor, ...]:
        """`tensors` without the parameters of a class that only carries attributes."""
        labelled = {id(parameter) for _, parameter in self.parameters if is_labelled(parameter)}
        return tuple(t for t in self.tensors if id(t) not in labelled)


@attrs.frozen(kw_only=True, eq=False)
class Tensors:
    """The distinct tensors of a module and of one call.

    Attributes:
        owned: the module's tensors.
        arguments: distinct tensors among the arguments.
        held: distinct tensors in plain attributes that are neither registered nor arguments.
        slots: all plain attributes that hold tensors.
        leaves: per leaf of the arguments the index into `arguments`, or None for a constant.
        constants: the leaves that are not tensors, None where they are.
        numbers: the leaves that are Python numbers and inputs all the same, as tensors of `arguments`.
        spec: structure of ``(args, kwargs)``.
        structure: the same as a string.
        flat: parameters, then buffers, then inputs.
    """

    owned: Owned
    arguments: tuple[Tensor, ...]
    held: tuple[Tensor, ...]
    slots: tuple[Slot, ...]
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]
    spec: Any
    structure: str
    flat: tuple[Tensor, ...]
    numbers: frozenset[int] = frozenset()

    def filled_leaves(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The leaves of the arguments, with these tensors as `arguments`."""
        pairs = zip(self.leaves, self.constants, strict=True)
        return [constant if place is None else tensors[place] for place, constant in pairs]

    @property
    def labels(self) -> list[str]:
        """For each leaf of the arguments the keyword or place that it was given by."""
        args, kwargs = unflatten(list(self.leaves), self.spec)
        named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        return [name for name, value in named for _ in flatten(value)[0]]

    @property
    def device(self) -> torch.device:
        """Where the module is: the device of its first parameter, else of its first buffer or input."""
        return self.flat[0].device if self.flat else torch.device("cpu")

    @property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """Every submodule by its name, once."""
        return self.owned.modules

    @property
    def parameters(self) -> tuple[tuple[tuple[str, ...], nn.Parameter], ...]:
        """Names and parameter."""
        return self.owned.parameters

    @property
    def buffers(self) -> tuple[tuple[tuple[str, ...], Tensor], ...]:
        """Names and buffer."""
        return self.owned.buffers

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors that are neither parameter nor buffer."""
        return (*self.arguments, *self.held)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each of `flat`."""
        slots = {slot.place: slot.name for slot in reversed(self.slots)}
        owned = (*(n[0] for n, _ in self.parameters), *(n[0] for n, _ in self.buffers))
        arguments = (f"input{i}" for i in range(len(self.arguments)))
        held = (slots[len(owned) + len(self.arguments) + i] for i in range(len(self.held)))
        return (*owned, *arguments, *held)


def collect(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensors:
    """Find the distinct tensors of a module and of a call."""
    return called_with(owned_by(module), args, kwargs)


def owned_by(module: nn.Module) -> Owned:
    """Find the distinct tensors of a module."""
    named = tuple(module.named_modules())
    return Owned(
        modules=named,
        parameters=_distinct(_registered(named, "_parameters")),
        buffers=_distinct(_registered(named, "_buffers")),
        plain=tuple(_plainly_held(named)),
    )


def called_with(
    owned: Owned,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    numbers: Mapping[Any, frozenset[int]] = NO_NUMBERS,
) -> Tensors:
    """Add the tensors of a call to those of the module.

    Args:
        owned: the module's tensors.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        numbers: by the structure of the arguments the leaves that are inputs where they are numbers.
    """
    leaves, spec, structure = _leaves_of(args, kwargs)
    inputs = frozenset(i for i in numbers.get(spec, ()) if is_number(leaves[i])) if numbers else frozenset()
    for i in inputs:
        leaves[i] = _as_tensor(leaves[i])
    index: dict[int, int] = {}
    arguments: list[Tensor] = []
    places: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            places.append(None)
            continue
        if id(leaf) not in index:
            index[id(leaf)] = len(arguments)
            arguments.append(leaf)
        places.append(index[id(leaf)])
    known = (*owned.registered, *arguments)  # several hundred tensors, copied at each call: once
    held: list[Tensor] = []
    slots: list[Slot] = []
    place_of = {id(tensor): place for place, tensor in enumerate(known)} if owned.plain else {}
    for name, holder, key, tensor in owned.plain:
        if id(tensor) not in place_of:
            place_of[id(tensor)] = len(known) + len(held)
            held.append(tensor)
        slots.append(Slot(name=name, holder=holder, key=key, place=place_of[id(tensor)]))
    return Tensors(
        owned=owned,
        arguments=tuple(arguments),
        held=tuple(held),
        slots=tuple(slots),
        leaves=tuple(places),
        constants=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        spec=spec,
        structure=structure,
        flat=(*known, *held) if held else known,
        numbers=inputs,
    )


def _leaves_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any, str]:
    """The leaves of the arguments, their structure, and that as a string."""
    leaves = [*args, *kwargs.values()]
    if _PLAIN_TENSORS.issuperset(map(type, leaves)):
        return leaves, *_structure_of_tensors(len(args), tuple(kwargs))
    leaves, spec = flatten((args, dict(kwargs)))
    return leaves, spec, str(spec)


@lru_cache(maxsize=64)
def _structure_of_tensors(positional: int, names: tuple[str, ...]) -> tuple[Any, str]:
    """The structure of a call with tensors only, as most are: to make it takes longer than a kernel."""
    _, spec = flatten(((None,) * positional, dict.fromkeys(names)))
    return spec, str(spec)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number that can be an input: a float, or a whole number of 32 bits."""
    return type(leaf) is float or (type(leaf) is int and abs(leaf) <= MOST_COUNTED)


def _as_tensor(number: int | float) -> Tensor:
    """A number as a tensor without dimensions, in memory that numpy owns: torch's meters do not count it."""
    return torch.from_numpy(np.array(number, dtype=np.float64 if type(number) is float else np.int64))


def _registered(named: Iterable[tuple[str, nn.Module]], registry: str) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every registered parameter or buffer; a submodule used twice counts once."""
    for prefix, submodule in named:
        for name, tensor in submodule.__dict__[registry].items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _distinct(named: Iterable[tuple[str, Any]]) -> tuple[tuple[tuple[str, ...], Any], ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple((tuple(names[key]), tensors[key]) for key in tensors)


def _plainly_held(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """(name, holder, key, tensor) of tensors in attributes, and in lists and dicts in attributes.

    A tensor with an autograd history is left out: a forward stored it, and it is not an input of the next
    call.
    """
    seen: set[int] = set()
    for prefix, submodule in named:
        attributes = submodule.__dict__
        for key, parameter in attributes["_parameters"].items():
            if parameter is not None and id(parameter) not in seen and is_labelled(parameter):
                seen.add(id(parameter))
                yield from label_tensors(parameter, f"{prefix}.{key}" if prefix else key)
        for key, value in attributes.items():
            kind = type(value)
            if key in REGISTRIES or (kind not in _PLAIN_TENSORS and kind is not list and kind is not dict):
                continue
            name = f"{prefix}.{key}" if prefix else key
            if kind is not list and kind is not dict:
                if _is_input(value):
                    yield name, attributes, key, value
            elif id(value) not in seen and len(value) <= MOST_HELD:
                seen.add(id(value))
                for item, inner in enumerate(value) if kind is list else value.items():
                    if isinstance(inner, Tensor) and _is_input(inner):
                        yield f"{name}[{item!r}]", value, item, inner


def _is_input(tensor: Tensor) -> bool:
    plain = type(tensor) in _PLAIN_TENSORS
    return plain and tensor.is_leaf and tensor.layout is torch.strided and tensor.device.type != "meta"
