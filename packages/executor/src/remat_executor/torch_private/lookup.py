"""Look up private names of torch; a missing one gives one clear error."""

import importlib
from typing import Any

import torch

from remat_executor.errors import UnsupportedTorch


def private_name(module: str, name: str) -> Any:
    """A name of a torch module that another version may lack.

    Raises:
        UnsupportedTorch: the installed torch lacks it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__) from None
