"""Import torchvision and transformers, which only some of the models need."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not fit the installed torch, a CPU build say.

    Its Python part then fails on two schemas that the operators would have brought; no model here calls them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT_LIBRARIES.append(library)
    return importlib.import_module("torchvision")


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


_KEPT_LIBRARIES: list[torch.library.Library] = []  # a Library takes its schemas along when it is collected
