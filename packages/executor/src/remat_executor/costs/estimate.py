"""Estimate the graph of a training step from shapes alone, for models that are too large to run.

Fake tensors on the planned device stand for parameters, buffers and inputs, so nothing of their size is
allocated and nothing runs. Times come from a platform. Workspaces of kernels, and what cuDNN's batch norms
keep for their backward, are unknown without running them and are left out; a budget needs some reserve where
they matter. A CUDA device need not be there, nor a build of torch for it (`capture.absent_device`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from remat_executor.capture.joint_graph import capture
from remat_executor.costs.annotate import op_cost
from remat_executor.costs.check_platform import check_platform
from remat_executor.errors import BadInput
from remat_executor.inspection.devices import check_device
from remat_executor.inspection.fake_module import with_fake_tensors
from remat_executor.translation.dropped_outputs import OutputsState, check_outputs
from remat_executor.translation.translate import translate
from remat_executor.ways.registry import families
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Platform, with_platform


def estimated_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    platform: Platform,
    *,
    device: torch.device | str = "cpu",
    differentiate: Iterable[int] | None = None,
    ways: Iterable[Family] | None = None,
    outputs: OutputsState = "kept",
) -> Graph:
    """Trace a training step from shapes.

    Args:
        model: the module, in the mode it will train in; on any device, the meta device too.
        args: positional sample inputs, on any device.
        kwargs: keyword sample inputs.
        platform: gives the times.
        device: the device whose operators are traced; ``cuda`` on machines without one, too.
        differentiate: indices among the output tensors that get gradients; None: a scalar in front, else all.
        ways: families of other ways to run ops, of which plans may choose; None for all that are exact.
        outputs: "dropped" if the caller drops the outputs that are not differentiated before the backward.

    Raises:
        BadInput: the model is not an `nn.Module`, or this machine does not have the device.
        CaptureError: the step is not one graph.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(problem=f"the model is a {type(model).__name__}, not an nn.Module", advice="wrap it")
    check_platform(platform)
    check_outputs(outputs)
    device = torch.device(device)
    absent = device if device.type == "cuda" and not _has_cuda() else None
    if absent is None:
        check_device(device)
    with with_fake_tensors(
        model, args, kwargs, device if absent is None else torch.device("meta")
    ) as tensors:
        captured = capture(model, tensors, differentiate=differentiate, absent=absent)
        conditions = (("estimate", device.type), ("training", str(model.training)))
        name = type(model).__name__
        found = translate(
            captured,
            tensors,
            name=name,
            conditions=conditions,
            absent=absent,
            families=families(ways),
            outputs=outputs,
        )
    costs = {
        (i, k): op_cost(found, found.graph, i, k)
        for i, op in enumerate(found.graph.ops)
        for k in range(len(op.implementations))
    }
    return with_platform(found.graph, costs, platform)


def _has_cuda() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"
