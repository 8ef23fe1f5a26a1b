"""Check the model, the sample and the device before any work."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor.module.forward_binding import takes
from remat_facade.errors import BadModel, BadSample
from remat_graph.errors import shown

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def as_call(sample: Any, sample_kwargs: Mapping[str, Any] | None = None) -> Arguments:
    """The arguments of the model call that a sample describes.

    Args:
        sample: a tensor, a tuple or list of positional inputs, or a mapping of keyword inputs.
        sample_kwargs: keyword inputs in addition to positional ones.

    Returns:
        Positional and keyword arguments.

    Raises:
        BadSample: the sample has another type, or a key is not a name.
    """
    named = _keywords("sample_kwargs", {} if sample_kwargs is None else sample_kwargs)
    if isinstance(sample, Tensor):
        return (sample,), named
    if isinstance(sample, tuple | list):
        return tuple(sample), named
    if isinstance(sample, Mapping):
        if named:
            raise BadSample(
                problem="is a mapping, and sample_kwargs is given too: put all keyword inputs into one"
            )
        return (), _keywords("the mapping", sample)
    raise BadSample(
        problem=f"is of type {type(sample).__name__}; expected a tensor, a tuple or list of positional "
        "inputs, or a mapping of keyword inputs"
    )


def check_model(
    model: object,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
    *,
    filled: bool = False,
) -> torch.device:
    """Check that a backward can be planned for this call.

    Args:
        model: the value given as the model.
        args: positional inputs.
        kwargs: keyword inputs.
        device: the device to run on; None for the device of the model.
        filled: whether tensors on the meta device will get values later.

    Returns:
        The device to run on.

    Raises:
        BadModel: the value is not a module, has nothing to train, or is on several devices.
        BadSample: an input is on another device, or the sample is a shape.
    """
    if not isinstance(model, nn.Module):
        problem = f"is of type {_kind(model)}; expected an nn.Module: wrap your computation in one"
        raise BadModel(problem=problem)
    if args and all(type(size) is int for size in args) and not takes(model.forward, args, kwargs):
        shape = ", ".join(map(str, args))
        raise BadSample(
            problem=f"is {len(args)} ints, not what the forward takes: for a shape give torch.randn({shape})"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise BadModel(problem=f"{name} has no shape yet: call the model once on a sample first")
        if tensor.is_meta and not filled:
            raise BadModel(problem=f"{name} is on the meta device: allocate it first, with model.to_empty")
    inputs = list(_named_tensors("sample", (*args, kwargs) if kwargs else args))
    if not any(tensor.requires_grad for _, tensor in [*model.named_parameters(), *inputs]):
        raise BadModel(
            problem="has no trainable parameter, so there is no backward to plan: call requires_grad_()"
        )
    devices = sorted({str(tensor.device) for _, tensor in tensors if not tensor.is_meta}) or ["cpu"]
    if len(devices) > 1:
        raise BadModel(
            problem=f"is on several devices ({', '.join(devices)}): move it to one, or plan its parts"
        )
    device = device or (torch.device(devices[0]) if tensors else inputs[0][1].device)
    for name, tensor in inputs:
        if tensor.device != device and tensor.dim():  # torch lets a 0-dimensional CPU tensor be anywhere
            raise BadSample(
                problem=f"{name} is on {tensor.device}, but the model runs on {device}: move one to the other"
            )
    return device


def check_forward(model: nn.Module) -> None:
    """Check that a call of the model runs a forward of its own, on one device.

    Raises:
        BadModel: nobody wrote a forward for it, or it is a `DataParallel`.
    """
    if isinstance(model, nn.DataParallel):
        raise BadModel(
            problem="is a DataParallel, which copies a model to several devices: give its `module`, and "
            "use DistributedDataParallel, a process for each device"
        )
    if _has_no_forward(model):
        inside = ", ".join(name for name, _ in model.named_children()) or "none"
        raise BadModel(
            problem=f"a {type(model).__name__} has no forward, so a limit would bound nothing: limit the "
            f"modules in it that training calls ({inside})"
        )


def _has_no_forward(model: nn.Module) -> bool:
    """Whether nobody wrote a forward for a module, as for a `ModuleList` or many a `LightningModule`."""
    if "forward" in vars(model):
        return False
    function = inspect.unwrap(type(model).forward)
    # Lightning's base class calls nn.Module's, which raises.
    of_lightning = getattr(function, "__qualname__", "") == "LightningModule.forward"
    return function is nn.Module.forward or of_lightning


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _keywords(what: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BadSample(problem=f"{what} is of type {_kind(given)}; expected a mapping from names to inputs")
    for name in given:
        if not isinstance(name, str):
            raise BadSample(problem=f"{what} has the key {shown(name)}; expected names as strings")
    return dict(given)


def _kind(thing: object) -> str:
    return f"class ({thing.__name__})" if isinstance(thing, type) else type(thing).__name__


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested containers."""
    return [tensor for _, tensor in _named_tensors("", value)]


def _named_tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(f"{name}[{shown(key)}]", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named_tensors(f"{name}[{index}]", item)
