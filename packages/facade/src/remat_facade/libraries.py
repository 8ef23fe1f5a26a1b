"""Import libraries of models whose build may not match the installed torch."""

import importlib
from types import ModuleType

import torch

from remat_graph.errors import text_of


def import_torchvision() -> ModuleType | None:
    """Import torchvision even if its compiled operators do not match the installed torch (a CPU build).

    Its Python code then lacks the schemas of two operators, which only models that detect objects call.

    Returns:
        The module; None if it is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "torchvision::nms" not in text_of(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision = importlib.import_module("torchvision")
    # The schemas exist as long as the Library object.
    torchvision.__dict__["_schemas_of_remat"] = library
    return torchvision
