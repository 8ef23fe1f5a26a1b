"""Find the module that a callback limits by its name."""

from torch import nn

from remat_facade.errors import BadModel
from remat_graph.errors import shown


def check_name(name: object) -> None:
    """Check the argument `module` of a callback before there is a model.

    Raises:
        BadModel: it is neither None nor a string.
    """
    if not isinstance(name, str | None):
        raise BadModel(problem=f'module is {shown(name)}; expected the name of a submodule, such as "model"')


def module_named(model: nn.Module, name: str) -> nn.Module:
    """The submodule of a model, such as ``"model"`` or ``"net.encoder"``.

    Raises:
        BadModel: there is none of this name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        kind, found = type(model).__name__, ", ".join(child for child, _ in model.named_children())
        problem = f"{kind} has no submodule {name!r}: name one of its modules ({found or 'none'})"
        raise BadModel(problem=problem) from error
