"""Look up private names of torch; a missing one gives one clear error."""

import importlib
import sys
from typing import Any

import torch

from remat_executor.errors import UnsupportedTorch


def private_name(module: str, name: str) -> Any:
    """A name of a torch module that another version may lack.

    Raises:
        UnsupportedTorch: the installed torch lacks it.
        ImportError: the module is there, and what it imports is not.
    """
    found: Any = sys.modules.get(module)
    # Called many times in a step. One that another thread is importing may lack names that it will have.
    if found is not None and hasattr(found, name):
        return getattr(found, name)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        found = None
    if not hasattr(found, name):  # the error is made only if it is raised
        raise UnsupportedTorch(name=f"{module}.{name}", version=torch.__version__)
    return getattr(found, name)
