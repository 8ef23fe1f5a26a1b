"""Import torchvision and transformers, which only some of the models need."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from remat_facade import libraries


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not fit the installed torch (a CPU build)."""
    found = libraries.import_torchvision()
    if found is None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    return found


def import_torchaudio() -> ModuleType:
    """Import torchaudio, or put an empty module in its place if its extension does not fit the torch."""
    try:
        return importlib.import_module("torchaudio")
    except OSError:
        module = ModuleType("torchaudio")
        module.__spec__ = ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = module
        return module


def import_torchtitan() -> None:
    """Let torchtitan be imported without triton, which kernels of its experts need and a CPU build lacks."""
    if importlib.util.find_spec("triton") is None:
        absent: Any = ModuleType("kernels")
        absent.__getattr__ = lambda name: None
        sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = absent


def import_transformers() -> Any:
    """Import transformers, which imports torchvision itself where that is installed, and fails with it."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return importlib.import_module("transformers")
