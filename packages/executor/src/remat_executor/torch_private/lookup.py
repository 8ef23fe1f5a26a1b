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
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        found = None
    # Called many times in a step: the error is made only if it is raised.
    if not hasattr(found, name):
        raise UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__)
    return getattr(found, name)
