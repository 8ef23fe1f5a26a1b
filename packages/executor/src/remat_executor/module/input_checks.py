"""Checks of a model and a sample, before the first step is captured."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from remat_executor.errors import BadInput
from remat_executor.guards.objections import (
    hooked,
    hooked_everywhere,
    is_planned,
    unseen_change,
    unsupported,
)
from remat_executor.inspection.tensors import Tensors, collect
from remat_graph.errors import shown


def output_indices(differentiate: object) -> tuple[int, ...] | None:
    """Check the indices of the outputs to differentiate.

    Raises:
        BadInput: they are not a list of whole numbers.
    """
    if differentiate is None:
        return None
    given = tuple(differentiate) if isinstance(differentiate, Iterable) else ()
    if not isinstance(differentiate, Iterable) or not all(type(i) is int for i in given):
        raise BadInput(
            problem=f"differentiate is {shown(differentiate)}, not a list of output indices",
            advice="name the outputs that get gradients, as in differentiate=[0]",
        )
    return given


def check_input(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device | None = None
) -> Tensors:
    """Collect the tensors of a model and a sample; check that they can be planned.

    With a `device`, the model may have no values yet: they are placed there later.

    Raises:
        BadInput: with what came and what to do.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(
            problem=f"the model is a {type(model).__name__}, not an nn.Module", advice="wrap it in one"
        )
    for name, submodule in model.named_modules():
        traced = "_parameters" not in vars(submodule)  # TorchScript keeps them elsewhere
        if traced or (submodule is model and isinstance(submodule, torch.jit.ScriptModule)):
            which = f"submodule {name!r}" if name else "the model"
            raise BadInput(
                problem=f"{which} is TorchScript, which cannot be captured",
                advice="give the module that was scripted or traced",
            )
        if is_planned(submodule):
            raise BadInput(
                problem=f"submodule {name!r} is planned already" if name else "the model is planned already",
                advice="plan the whole model, or its parts, from the originals: `.module` of a wrapper, or "
                "`release(model)` of one with a memory limit",
            )
    tensors = collect(model, args, kwargs)
    # Fake tensors carry no labels; see `with_fake_tensors`.
    owned = tensors.owned.unlabelled if device is None else tensors.owned.tensors
    strange = unsupported(tensors.arguments, "the sample holds") or unsupported(
        (*owned, *tensors.held), "the model has", empty=device is not None
    )
    if strange is not None:
        raise BadInput(problem=strange, advice="plan the parts of the model that have plain, dense tensors")
    device = device or tensors.device
    for tensor in tensors.arguments:
        if tensor.device != device and tensor.ndim > 0:
            raise BadInput(
                problem=f"the sample is on {tensor.device}, and the model runs on {device}",
                advice=f"move the sample with .to({str(device)!r})",
            )
    if not any(t.requires_grad for t in tensors.flat):
        raise BadInput(
            problem="the model has no trainable parameter and no input requires a gradient",
            advice="set requires_grad on the parameters to train",
        )
    strange = unseen_change(tensors)
    if strange is not None:
        raise BadInput(
            problem=f"the sample holds a {strange}, which could change without being noticed",
            advice="pass tensors, numbers, strings or containers of them; clone a tensor of the module",
        )
    hook = hooked_everywhere() or hooked(tensors.modules)
    if hook is not None:
        raise BadInput(
            problem=f"{hook}, which a planned module would not call",
            advice="remove them, or plan a part of the model without them",
        )
    return tensors
