"""Look up private names of torch; a missing one gives one clear error."""

import importlib
from typing import Any

import torch

from remat_executor.errors import UnsupportedTorch


def private_name(module: str, name: str) -> Any:
    """A name of a torch module that another version may lack.

    Raises:
        UnsupportedTorch: the installed torch lacks it.
        ImportError: the module is there, and what it imports is not.
    """
    unsupported = UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise unsupported from None
    try:
        return getattr(found, name)
    except AttributeError:
        raise unsupported from None
