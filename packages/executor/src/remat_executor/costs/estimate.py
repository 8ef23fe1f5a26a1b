"""The graph of a training step from shapes alone: of a model on the meta device, or too large for here.

Parameters, buffers and inputs are stood in for by fake tensors of the device to plan for, so nothing of their
size is allocated and nothing is run. Times are a platform's. Scratch memory of kernels is not known without
running them: it is left out, and where it matters a budget wants some reserve. The graph is the one that this
build of torch traces for that device: a CPU's is an estimate of a GPU's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from remat_executor.capture.joint_graph import capture
from remat_executor.costs.annotate import op_cost
from remat_executor.errors import BadInput
from remat_executor.inspection.fake_module import with_fake_tensors
from remat_executor.translation.translate import translate
from remat_graph import Graph
from remat_graph.platforms.base import Platform, with_platform


def estimated_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    platform: Platform,
    *,
    device: torch.device | str = "cpu",
    differentiate: Iterable[int] | None = None,
) -> Graph:
    """Trace a training step of which only shapes are there.

    Args:
        model: the module, in the mode it will train in; on any device, the meta device too.
        args: positional sample inputs, on any device.
        kwargs: keyword sample inputs.
        platform: gives the times.
        device: the device whose operators are traced.
        differentiate: indices among the output tensors that get gradients; None: a lone scalar in front, else
            all.

    Raises:
        BadInput: the model is none.
        CaptureError: the step is not one graph.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(problem=f"the model is a {type(model).__name__}, not an nn.Module", advice="wrap it")
    place = torch.device(device)
    with with_fake_tensors(model, args, kwargs, place) as tensors:
        captured = capture(model, tensors, differentiate=differentiate)
        conditions = (("estimate", place.type), ("training", str(model.training)))
        found = translate(captured, tensors, name=type(model).__name__, conditions=conditions)
    costs = {
        (i, k): op_cost(recipe, found.graph, i, k)
        for i, recipe in enumerate(found.recipes)
        for k in range(len(found.graph.ops[i].implementations))
    }
    return with_platform(found.graph, costs, platform)
