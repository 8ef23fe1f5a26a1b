"""Private names of modules: the attributes that hold their hooks, and the function that calls them."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold the hooks called in a step."""

_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)

READ_REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes that every module has and that a step depends on."""


def hook_registries(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The registries of this module's own hooks that are called in a step."""
    return [getattr(module, name) for name in HOOKS]


def global_module_hooks() -> bool:
    """Whether hooks are registered for all modules."""
    return any(private_name("torch.nn.modules.module", name) for name in _GLOBAL_HOOKS)


def running_modules() -> Iterator[torch.nn.Module]:
    """The modules that are being called in this thread, the innermost first."""
    call = torch.nn.Module._call_impl.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
