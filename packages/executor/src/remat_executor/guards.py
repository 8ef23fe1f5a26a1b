"""Guards: what a captured step depends on, read anew at each call, and when the original must run instead."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.contents import PLAIN
from remat_executor.settings import exactly, settings
from remat_executor.tensors import Tensors

SHARD_LATER = "plan the parts first and shard them then, as in fully_shard(Hiremate(block, ...))"


@attrs.frozen(kw_only=True)
class Signature:
    """Everything that decides which graph a call runs; hashable.

    Attributes:
        modules: of every submodule its name, its class, whether it trains, and which ones it holds where.
        settings: plain attributes of every submodule.
        sharing: for each tensor the first one that shares its storage.
        parameters: layout and requires_grad of each parameter, and which names share one.
        buffers: the same of each buffer.
        inputs: layout and requires_grad of each input tensor, the places of leaves and slots.
        constants: the arguments that are not tensors.
        spec: structure of the arguments, as text.
        flags: (name, value) of the global state that changes kernels.
    """

    modules: tuple[tuple[str, type, bool, tuple[Any, ...]], ...]
    settings: tuple[Any, ...]
    sharing: tuple[int, ...]
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...]
    spec: str
    flags: tuple[tuple[str, str], ...]

    def changes(self, other: "Signature") -> str:
        """In which respects another call differs from this one."""
        fields = [field.name for field in attrs.fields(Signature)]
        changed = {name: name for name in fields if getattr(self, name) != getattr(other, name)}
        if "settings" in changed:
            names = {entry[0] for entry in {*self.settings} ^ {*other.settings}}
            changed["settings"] += f" ({', '.join(sorted(names))})" if names else ""
        return ", ".join(changed.values())

    def conditions(self) -> tuple[tuple[str, str], ...]:
        """What of it a plan's fingerprint covers beside the ops."""
        modes = {training for _, _, training, _ in self.modules}
        mode = "mixed" if len(modes) > 1 else "train" if True in modes else "eval"
        # Without the device's index: ranks on different devices run one plan.
        flags = ((name, value.partition(":")[0] if "device" in name else value) for name, value in self.flags)
        return (("mode", mode), *flags)


def signature(tensors: Tensors) -> Signature:
    """Read the signature of a call."""
    return Signature(
        modules=_structure(tensors.modules),
        settings=settings(m for _, m in tensors.modules),
        sharing=_sharing(tensors.flat),
        parameters=tuple((names, _layout(p), p.requires_grad) for names, p in tensors.parameters),
        buffers=tuple((names, _layout(b), b.requires_grad) for names, b in tensors.buffers),
        inputs=(
            tensors.leaves,
            tuple((slot.name, slot.place) for slot in tensors.slots),
            *((_layout(t), t.requires_grad) for t in tensors.inputs),
        ),
        constants=tuple(exactly(c) for c in tensors.constants),
        spec=str(tensors.spec),
        flags=global_flags(tensors.flat[0].device.type if tensors.flat else "cpu"),
    )


def _structure(
    modules: Sequence[tuple[str, nn.Module]],
) -> tuple[tuple[str, type, bool, tuple[Any, ...]], ...]:
    """A submodule that is held twice is listed once, so who holds it is part of the structure."""
    place = {id(module): i for i, (_, module) in enumerate(modules)}
    place[id(None)] = -1
    return tuple(
        (name, type(m), m.training, tuple((key, place[id(child)]) for key, child in m._modules.items()))
        for name, m in modules
    )


def global_flags(device_type: str) -> tuple[tuple[str, str], ...]:
    """The global state of torch that changes which kernels run."""
    autocast = "off"
    if torch.is_autocast_enabled(device_type):
        autocast = str(torch.get_autocast_dtype(device_type))
    sdp = torch.backends.cuda
    attention = [sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()]
    return (
        ("autocast", autocast),
        ("deterministic", str(torch.are_deterministic_algorithms_enabled())),
        ("matmul_precision", torch.get_float32_matmul_precision()),
        ("attention", str(attention)),
        ("default_dtype", str(torch.get_default_dtype())),
        ("default_device", str(torch.get_default_device())),
        ("libraries", str([torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled])),
    )


def _sharing(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(torch_private.storage_id(t), i) for i, t in enumerate(tensors))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj())


def hooked(tensors: Tensors) -> str | None:
    """What has hooks, a submodule by name or all of them; None if nothing has. A graph would not call them.

    The hooks that transformers installs on its own models at their first call are no reason: they hand on
    what the call asked for, within the call, and are captured with it. Nor are those of this package.
    """
    if torch_private.global_module_hooks():
        return "every module (global hooks)"
    for name, submodule in tensors.modules:
        for hook in torch_private.module_hooks(submodule):
            if not (getattr(hook, "__module__", None) or "").startswith(("transformers.", "remat_executor.")):
                return f"submodule {(name or type(submodule).__name__)!r}"
    return None


def reason_for_original(tensors: Tensors) -> str | None:
    """Why a call must run the original module; None if a plan can serve it."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are off (no_grad or inference mode)"
    transformed = torch_private.transformed()
    if transformed is not None:
        return transformed
    if not any(t.requires_grad for t in tensors.flat):
        return "nothing requires a gradient"
    odd = next((t for t in tensors.flat if type(t) not in (Tensor, nn.Parameter, nn.Buffer)), None)
    if type(odd).__name__ == "DTensor":
        return f"inside it are sharded parameters: {SHARD_LATER}"
    if odd is not None:
        return f"it was given a {type(odd).__name__}, a tensor subclass"
    strange = unseen_change(tensors)
    if strange is not None:
        return f"it was given a {strange}, which could change without being seen"
    hook = hooked(tensors)
    if hook is not None:
        return f"{hook} has hooks"
    return None


def unseen_change(tensors: Tensors) -> str | None:
    """What is wrong with an argument that cannot be compared by value or is the module's own."""
    own = {id(t) for _, t in (*tensors.parameters, *tensors.buffers)}
    if any(id(t) in own for t in tensors.arguments):
        return "parameter or buffer of its own"
    odd = (c for c in tensors.constants if not (isinstance(c, PLAIN) or callable(c) or isinstance(c, Enum)))
    return next((type(c).__name__ for c in odd), None)
