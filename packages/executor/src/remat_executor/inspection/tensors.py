"""The tensors of a module and of one call, which capture turns into the inputs of a graph.

Distinct means by identity, so a tied parameter is one input whose gradient autograd sums in its own order.
Beside parameters, buffers and arguments there is what a module merely holds and its forward may read: a
position table in a plain attribute, anchors in a list.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.torch_private.pytrees import flatten

REGISTRIES = frozenset(nn.Module().__dict__)
"""The attributes that every module has for itself."""


MOST_HELD = 1_000
"""A list or dict with more entries is not looked through for tensors at each call."""


@attrs.frozen(kw_only=True, eq=False)
class Slot:
    """A place in a plain attribute that holds a tensor: ``holder[key]``.

    Attributes:
        name: what a user calls it.
        holder: dict or list.
        key: of the holder.
        place: index of the tensor in `Tensors.flat`.
    """

    name: str
    holder: Any
    key: Any
    place: int


@attrs.frozen(kw_only=True, eq=False)
class Owned:
    """The distinct tensors of a module, whatever it is called with.

    Attributes:
        modules: every submodule by its name, once; the module itself first.
        parameters: (names, parameter) with every name that reaches it.
        buffers: (names, buffer) likewise.
        plain: (name, holder, key, tensor) of what plain attributes hold.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    parameters: tuple[tuple[tuple[str, ...], nn.Parameter], ...]
    buffers: tuple[tuple[tuple[str, ...], Tensor], ...]
    plain: tuple[tuple[str, Any, Any, Tensor], ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, those in plain attributes as often as they are held."""
        registered = (*self.parameters, *self.buffers)
        return (*(t for _, t in registered), *(t for _, _, _, t in self.plain))


@attrs.frozen(kw_only=True, eq=False)
class Tensors:
    """The distinct tensors of a module and of one call.

    Attributes:
        owned: what of it is the module's.
        arguments: distinct tensors among the arguments.
        held: distinct tensors in plain attributes that are neither registered nor arguments.
        slots: where the plain attributes hold tensors, of whichever kind.
        leaves: per leaf of the arguments the index into `arguments`, or None for a constant.
        constants: the leaves that are not tensors, None where they are.
        spec: structure of ``(args, kwargs)``.
        flat: parameters, then buffers, then inputs.
    """

    owned: Owned
    arguments: tuple[Tensor, ...]
    held: tuple[Tensor, ...]
    slots: tuple[Slot, ...]
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]
    spec: Any
    flat: tuple[Tensor, ...]

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
        """What is neither parameter nor buffer."""
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


def called_with(owned: Owned, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensors:
    """Add the tensors of a call to those of the module."""
    leaves, spec = flatten((args, dict(kwargs)))
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
    known = [*(p for _, p in owned.parameters), *(b for _, b in owned.buffers), *arguments]
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
        flat=(*known, *held),
    )


def _registered(named: Iterable[tuple[str, nn.Module]], registry: str) -> Iterator[tuple[str, Any]]:
    """Every place that holds a parameter or buffer, by name; a submodule used twice counts once."""
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
    """(name, holder, key, tensor) of tensors in attributes, and in the lists and dicts in attributes.

    Left out is what a forward left behind: a tensor with a history is no input of the next call.
    """
    seen: set[int] = set()
    for prefix, submodule in named:
        attributes = submodule.__dict__
        for key, value in attributes.items():
            kind = type(value)
            if key in REGISTRIES or kind not in (Tensor, nn.Parameter, nn.Buffer, list, dict):
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
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.is_leaf and tensor.layout is torch.strided and tensor.device.type != "meta"
