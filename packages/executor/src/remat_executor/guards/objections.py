"""Why a call must run the original, or a model cannot be planned: what no graph or guard covers."""

from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from remat_executor.inspection.object_contents import PLAIN
from remat_executor.inspection.tensors import Owned, Tensors
from remat_executor.torch_private.autograd import active_transform
from remat_executor.torch_private.module_hooks import global_module_hooks, hook_registries

NO_GRADIENT = "nothing requires a gradient"
"""The reason that surprises nobody."""

_SHARD_LATER = "plan the parts first and shard them then, as in fully_shard(Hiremate(block, ...))"


def hooked(modules: Sequence[tuple[str, nn.Module]]) -> str | None:
    """Which submodule has hooks, which a graph would not call; None if none has.

    Hooks of the module itself, the first of these, run outside of its plan, unless its `__call__` is planned.
    Hooks of this package do not count, nor those that transformers installs on its models at their first
    call: they only collect outputs within the call, and are captured with it.
    """
    for name, submodule in modules if calls_itself(modules[0][1]) else modules[1:]:
        for registry in hook_registries(submodule):
            for hook in registry.values():
                made_by = getattr(hook, "__module__", None) or ""
                if not made_by.startswith(("transformers.", "remat_executor.")):
                    return f"submodule {(name or type(submodule).__name__)!r} has hooks"
    return None


def hooked_everywhere() -> str | None:
    """That hooks are registered for all modules, as a message; None if none are."""
    return "every module (global hooks) has hooks" if global_module_hooks() else None


def is_planned(module: nn.Module) -> bool:
    """Whether a module has a plan."""
    return hasattr(type(module), "_remat")


def calls_itself(module: nn.Module) -> bool:
    """Whether a module's class overrides `__call__`, which is then planned with its hooks."""
    return type(module).__call__ is not nn.Module.__call__


def objection(owned: Owned) -> str | None:
    """Why the module must run without a plan, whatever the call; None if a plan can serve."""
    planned = next((name for name, m in owned.modules if is_planned(m)), None)
    if planned is not None:
        return f"submodule {planned!r} is planned itself"
    return unsupported(owned.unlabelled, "it has") or hooked(owned.modules)


def reason_in_force() -> str | None:
    """Why no plan can serve now; checked first, since some transforms forbid reading tensors."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are off (no_grad or inference mode)"
    return active_transform() or hooked_everywhere()


def reason_for_original(tensors: Tensors) -> str | None:
    """Why a call must run the original because of its tensors; None if a plan can serve."""
    if not any(t.requires_grad for t in tensors.flat):
        return NO_GRADIENT
    strange = unseen_change(tensors)
    if strange is not None:
        return f"it was given a {strange}, which could change without being noticed"
    return unsupported(tensors.inputs, "it was given")


def unsupported(tensors: Iterable[Tensor], whose: str, *, empty: bool = False) -> str | None:
    """Which tensor a plan cannot handle, and why; with `empty`, tensors without values are accepted."""
    for tensor in tensors:
        kind = type(tensor)
        if kind.__name__ == "DTensor":
            return f"inside it are sharded parameters: {_SHARD_LATER}"
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
    if any(id(t) in tensors.owned.registered_ids for t in tensors.arguments):
        return "parameter or buffer of its own"
    unknown = (c for c in tensors.constants if not (isinstance(c, (*PLAIN, Enum)) or callable(c)))
    return next((type(c).__name__ for c in unknown), None)
