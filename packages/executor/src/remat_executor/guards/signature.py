"""The signature of a call: what a captured step depends on, read at each call."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.guards.external_state import ExternalState
from remat_executor.guards.global_flags import global_flags
from remat_executor.inspection.attribute_keys import attribute_keys, exact_key, key_of
from remat_executor.inspection.labelled_tensors import is_labelled, labels
from remat_executor.inspection.object_contents import TraversalLimit
from remat_executor.inspection.reads import Reads
from remat_executor.inspection.tensors import Owned, Tensors
from remat_executor.torch_private.tensors import memory_id

NUMBER = "a number that is an input"
"""Stands for the number, whose dtype is among the inputs: a tensor in its place would be another call."""


@attrs.frozen(kw_only=True, unsafe_hash=True, cache_hash=True)
class OwnSignature:  # noqa: PLW1641 - attrs makes `__hash__`
    """The module's part of a signature; hashable.

    Attributes:
        modules: of every submodule its name, class, mode and children.
        attributes: plain attributes of every submodule.
        external_state: what else its forwards can read: globals, attributes of classes, closures.
        sharing: for each tensor the first one that shares its storage.
        parameters: names, layout, requires_grad and labels of each parameter.
        buffers: the same for each buffer.
        reads: which attributes are in the signature.
    """

    modules: tuple[tuple[str, type, bool, tuple[Any, ...]], ...]
    attributes: tuple[Any, ...]
    external_state: tuple[Any, ...]
    sharing: tuple[int, ...]
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]
    reads: Reads

    def __eq__(self, other: object) -> bool:
        """Whether the contents are equal; those of the same object, as a rule, are not compared."""
        if self is other:
            return True
        if not isinstance(other, OwnSignature):
            return NotImplemented
        return _contents(self) == _contents(other)


_contents = attrgetter(*(field.name for field in attrs.fields(OwnSignature)))


@attrs.frozen(kw_only=True, cache_hash=True)
class Signature:
    """Everything that decides which graph a call runs; hashable.

    Attributes:
        own: the module's part.
        sharing: for each input the first tensor that shares its storage: one of the module, else (below 0)
            one of the inputs.
        inputs: layout and requires_grad of each input tensor, the places of leaves and slots.
        constants: the arguments that are not tensors; `NUMBER` for a number that is an input.
        spec: structure of the arguments, as a string.
        flags: (name, value) of the global state that changes kernels.
        forward: key of the function that the call runs, if it is not the module's own forward.
    """

    own: OwnSignature
    sharing: tuple[int, ...]
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...]
    spec: str
    flags: tuple[tuple[str, str], ...]
    forward: Any = None

    def conditions(self) -> tuple[tuple[str, str], ...]:
        """What a plan's fingerprint covers in addition to the ops."""
        modes = {training for _, _, training, _ in self.own.modules}
        mode = "mixed" if len(modes) > 1 else "train" if True in modes else "eval"
        # The index of the device is left out: ranks on different devices run one plan.
        flags = ((name, value.partition(":")[0] if "device" in name else value) for name, value in self.flags)
        return (("mode", mode), *flags)


def own_signature(
    owned: Owned, first: Mapping[int, int], limit: TraversalLimit, external_state: ExternalState
) -> OwnSignature:
    """Read the module's part of a signature.

    Args:
        owned: the module's tensors.
        first: `storages(owned)`.
        limit: says which attributes are read, and records what is read.
        external_state: what else its forwards can read.
    """
    return OwnSignature(
        modules=_structure(owned.modules),
        attributes=attribute_keys((m for _, m in owned.modules), limit),
        external_state=external_state.restricted(limit.reads).keys(limit),
        sharing=_sharing(owned.tensors, first),
        parameters=tuple((names, _layout(p), p.requires_grad, *_labels(p)) for names, p in owned.parameters),
        buffers=tuple((names, _layout(b), b.requires_grad) for names, b in owned.buffers),
        reads=limit.reads,
    )


def storages(owned: Owned) -> dict[int, int]:
    """The place of the first tensor with each storage; one without memory shares nothing."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(owned.tensors):
        memory = memory_id(tensor)
        if memory is not None:
            first.setdefault(memory, place)
    return first


def _sharing(tensors: Sequence[Tensor], first: Mapping[int, int]) -> tuple[int, ...]:
    """For each tensor of a module the first one that shares its storage."""
    ids = map(memory_id, tensors)
    return tuple(place if memory is None else first[memory] for place, memory in enumerate(ids))


def signature(
    tensors: Tensors, own: OwnSignature, owned_storages: Mapping[int, int], device: torch.device | None = None
) -> Signature:
    """Read the signature of a call that runs on `device`; None: where the module is."""
    inputs = tensors.inputs
    ids = list(map(memory_id, inputs))
    first = {memory: -1 - i for i, memory in reversed([*enumerate(ids)]) if memory is not None}
    return Signature(
        own=own,
        sharing=tuple(
            -1 - i if memory is None else owned_storages.get(memory, first[memory])
            for i, memory in enumerate(ids)
        ),
        inputs=(
            tensors.leaves,
            tuple((slot.name, slot.place) for slot in tensors.slots),
            *((_layout(t), t.requires_grad) for t in inputs),
        ),
        constants=tuple(
            NUMBER if i in tensors.numbers else exact_key(c) for i, c in enumerate(tensors.constants)
        ),
        spec=tensors.structure,
        flags=global_flags(device or tensors.device),
    )


def _structure(
    modules: Sequence[tuple[str, nn.Module]],
) -> tuple[tuple[str, type, bool, tuple[Any, ...]], ...]:
    """A submodule that is used twice is listed once, so its parents are part of the structure."""
    place = {id(module): i for i, (_, module) in enumerate(modules)}
    place[id(None)] = -1
    return tuple(
        (name, type(m), m.training, tuple((key, place[id(child)]) for key, child in m._modules.items()))
        for name, m in modules
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj())


def _labels(parameter: Tensor) -> tuple[Any, ...]:
    """Read whole, since a capture reads them in objects that are not observed."""
    return (key_of(labels(parameter)),) if is_labelled(parameter) else ()
