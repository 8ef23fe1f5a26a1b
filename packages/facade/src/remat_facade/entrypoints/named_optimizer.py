"""Create the optimizer that a config names."""

import sys
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat_facade.config.types import OffmateConfig
from remat_facade.errors import BadConfig
from remat_graph.errors import shown, text_of


def named_optimizer(config: OffmateConfig, model: nn.Module) -> Optimizer:
    """Create the optimizer that a config names, or Adam, for all trainable parameters of the model.

    Raises:
        BadConfig: the class is unknown or not imported, or does not accept the options.
    """
    found = _optimizer_class(config.optimizer or "Adam")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = 'a class of torch.optim such as "AdamW", "module:Class", or a name of remat.optimizers'
        raise BadConfig(field="optimizer", problem=f"expected {known}, got {shown(config.optimizer)}")
    trained = [param for param in model.parameters() if param.requires_grad]
    options: dict[str, Any] = dict(config.optimizer_options)
    try:
        return found(trained, **options)
    except Exception as error:  # whatever the class raises
        problem = f"{found.__name__} does not accept {shown(options)}: {text_of(error)}"
        raise BadConfig(field="optimizer_options", problem=" ".join(problem.split())) from error


def _optimizer_class(name: str) -> object:
    """The object of a name, or None.

    A config is data and never causes an import, so the program must have imported the module already. An
    installed distribution may register an optimizer as an entry point.

    Raises:
        BadConfig: the module is not imported, or the entry point cannot be loaded.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        if name in vars(torch.optim):
            return vars(torch.optim)[name]
        offered = {point.name: point for point in entry_points(group="remat.optimizers")}
        try:
            return offered[name].load() if name in offered else None
        except Exception as error:  # whatever that package raises
            problem = f"{shown(name)} cannot be loaded ({text_of(error)})"
            raise BadConfig(field="optimizer", problem=" ".join(problem.split())) from error
    module = sys.modules.get(module_name)
    if module is None:
        problem = f"names the module {shown(module_name)}, which is not imported: import it in your program"
        raise BadConfig(field="optimizer", problem=f"{problem} first")
    return vars(module).get(attribute)
