"""How private names of torch are looked up: one that is missing gives one clear error."""

import importlib
from typing import Any

import torch

from remat_executor.errors import UnsupportedTorch


def private_name(module: str, name: str) -> Any:
    """A name of a module of torch's that may be missing in another version.

    Raises:
        UnsupportedTorch: the torch that is installed lacks it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__) from None
