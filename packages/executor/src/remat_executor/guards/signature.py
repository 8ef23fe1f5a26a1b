"""Guards: what a captured step depends on, read at each call, and when the original must run instead."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.guards.external_state import ExternalState
from remat_executor.guards.global_flags import global_flags
from remat_executor.inspection.attribute_keys import attribute_keys, exact_key
from remat_executor.inspection.object_contents import PLAIN, TraversalLimit
from remat_executor.inspection.tensors import Owned, Tensors
from remat_executor.torch_private.autograd import active_transform
from remat_executor.torch_private.module_hooks import global_module_hooks, hook_registries
from remat_executor.torch_private.tensors import storage_id

SHARD_LATER = "plan the parts first and shard them then, as in fully_shard(Hiremate(block, ...))"


@attrs.frozen(kw_only=True, cache_hash=True)
class OwnSignature:
    """The module's part of a signature; hashable.

    Attributes:
        modules: of every submodule its name, class, mode and children.
        attributes: plain attributes of every submodule.
        external_state: what else its forwards can read: globals, attributes of classes, closures.
        sharing: for each tensor the first one that shares its storage.
        parameters: names, layout and requires_grad of each parameter.
        buffers: the same for each buffer.
    """

    modules: tuple[tuple[str, type, bool, tuple[Any, ...]], ...]
    attributes: tuple[Any, ...]
    external_state: tuple[Any, ...]
    sharing: tuple[int, ...]
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]


@attrs.frozen(kw_only=True, cache_hash=True)
class Signature:
    """Everything that decides which graph a call runs; hashable.

    Attributes:
        own: the module's part.
        sharing: for each input the first tensor that shares its storage: one of the module, else (below 0)
            one of the inputs.
        inputs: layout and requires_grad of each input tensor, the places of leaves and slots.
        constants: the arguments that are not tensors.
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

    def changes(self, other: "Signature") -> str:
        """Names of what differs between two calls, for messages."""
        changed: dict[str, str] = {}
        for mine, theirs in ((self.own, other.own), (self, other)):
            names = [field.name for field in attrs.fields(type(mine)) if field.name != "own"]
            changed |= {name: name for name in names if getattr(mine, name) != getattr(theirs, name)}
        for name in ("attributes", "external_state"):
            if name in changed:
                entries = {*getattr(self.own, name)} ^ {*getattr(other.own, name)}
                differing = ", ".join(sorted({entry[0] for entry in entries}))
                label = name.replace("_", " ")  # of the field alone: the entries are the user's names
                changed[name] = f"{label} ({differing})" if differing else label
        return ", ".join(changed.values())

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
    """Read the module's part of a signature; `first` is `storages(owned)`, `limit` records what is read."""
    return OwnSignature(
        modules=_structure(owned.modules),
        attributes=attribute_keys((m for _, m in owned.modules), limit),
        external_state=external_state.keys(limit),
        sharing=tuple(first[storage_id(t)] for t in owned.tensors),
        parameters=tuple((names, _layout(p), p.requires_grad) for names, p in owned.parameters),
        buffers=tuple((names, _layout(b), b.requires_grad) for names, b in owned.buffers),
    )


def storages(owned: Owned) -> dict[int, int]:
    """The place of the first tensor with each storage."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(owned.tensors):
        first.setdefault(storage_id(tensor), place)
    return first


def signature(
    tensors: Tensors, own: OwnSignature, owned_storages: Mapping[int, int], device: torch.device | None = None
) -> Signature:
    """Read the signature of a call that runs on `device`; None: where the module is."""
    inputs = tensors.inputs
    first = {storage_id(t): -1 - i for i, t in reversed(list(enumerate(inputs)))}
    first.update(owned_storages)
    return Signature(
        own=own,
        sharing=tuple(first[storage_id(t)] for t in inputs),
        inputs=(
            tensors.leaves,
            tuple((slot.name, slot.place) for slot in tensors.slots),
            *((_layout(t), t.requires_grad) for t in inputs),
        ),
        constants=tuple(exact_key(c) for c in tensors.constants),
        spec=str(tensors.spec),
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


def hooked(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Which submodule has hooks, which a graph would not call; None if none has.

    Hooks of this package do not count, nor those that transformers installs on its models at their first
    call: they only collect outputs within the call, and are captured with it.
    """
    for name, submodule in modules:
        for registry in hook_registries(submodule):
            for hook in registry.values():
                made_by = getattr(hook, "__module__", None) or ""
                if not made_by.startswith(("transformers.", "remat_executor.")):
                    return f"submodule {(name or type(submodule).__name__)!r} has hooks"
    return None


def is_planned(module: nn.Module) -> bool:
    """Whether a module has a plan."""
    return hasattr(type(module), "_remat")


def calls_itself(module: nn.Module) -> bool:
    """Whether a module's class overrides `__call__`, which is then planned with its hooks."""
    return type(module).__call__ is not nn.Module.__call__


def hookless(modules: Sequence[tuple[str, nn.Module]]) -> Sequence[tuple[str, nn.Module]]:
    """The submodules that must have no hooks; hooks of the module itself run outside of its plan."""
    return modules if calls_itself(modules[0][1]) else modules[1:]


def objection(owned: Owned) -> str | None:
    """Why the module must run without a plan, whatever the call; None if a plan can serve."""
    planned = next((name for name, m in owned.modules if is_planned(m)), None)
    if planned is not None:
        return f"submodule {planned!r} is planned itself"
    return odd(owned.tensors, "it has") or hooked(hookless(owned.modules))


def reason_in_force() -> str | None:
    """Why no plan can serve now; checked first, since some transforms forbid reading tensors."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are off (no_grad or inference mode)"
    transformed = active_transform()
    if transformed is not None:
        return transformed
    if global_module_hooks():
        return "every module (global hooks) has hooks"
    return None


def reason_for_original(tensors: Tensors) -> str | None:
    """Why a call must run the original because of its tensors; None if a plan can serve."""
    if not any(t.requires_grad for t in tensors.flat):
        return "nothing requires a gradient"
    strange = unseen_change(tensors)
    if strange is not None:
        return f"it was given a {strange}, which could change without being noticed"
    return odd(tensors.inputs, "it was given")


def odd(tensors: Iterable[Tensor], whose: str, *, empty: bool = False) -> str | None:
    """Which tensor a plan cannot handle, and why; with `empty`, tensors without values are accepted."""
    for tensor in tensors:
        kind = type(tensor)
        if kind.__name__ == "DTensor":
            return f"inside it are sharded parameters: {SHARD_LATER}"
        if kind not in (Tensor, nn.Parameter, nn.Buffer):
            return f"{whose} a {kind.__name__}, a tensor subclass"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"{whose} a tensor of layout {'nested' if tensor.is_nested else tensor.layout}"
        if tensor.is_quantized:
            return f"{whose} a quantized tensor"
        if tensor.is_meta and not empty:
            return f"{whose} a tensor without values, on the device meta"
    return None


def unseen_change(tensors: Tensors) -> str | None:
    """An argument that cannot be compared by value, or is the module's own tensor; None if there is none."""
    if tensors.arguments:
        own = {id(t) for _, t in (*tensors.parameters, *tensors.buffers)}
        if any(id(t) in own for t in tensors.arguments):
            return "parameter or buffer of its own"
    odd = (c for c in tensors.constants if not (isinstance(c, PLAIN) or callable(c) or isinstance(c, Enum)))
    return next((type(c).__name__ for c in odd), None)
