"""Give a model without values its weights, from a file or a mapping, without a second copy of them.

Parameters stay the objects that they are, so that an optimizer over them, made before, trains them.
"""

from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor, nn

from remat_offload.errors import BadWeights

Weights = str | PathLike[str] | Mapping[str, Tensor]


def fill(model: nn.Module, weights: Weights) -> None:
    """Fill every parameter and buffer on the meta device, on the CPU.

    Args:
        model: the module; what has values already keeps them.
        weights: a safetensors file, or a mapping from names to tensors; of tied tensors any name serves, and
            buffers that are not saved with a model may be named too.

    Raises:
        BadWeights: something is missing, or has another shape, or they are none; nothing was changed.
    """
    names: dict[int, list[str]] = {}
    empty: dict[int, Tensor] = {}
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for prefix, module in model.named_modules():
        registries: tuple[Any, ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
                    empty[id(tensor)] = tensor
                    places.setdefault(id(tensor), []).append((registry, name))
    known, read = _reader(weights)
    found = {key: next((name for name in names[key] if name in known), None) for key in empty}
    missing = [names[key][0] for key, name in found.items() if name is None]
    if missing:
        raise BadWeights(
            problem=f"they lack {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if missing[3:] else ""),
            advice="give values for all; buffers that are not saved can be added to a mapping by their names",
        )
    values = {}
    for key, name in found.items():
        assert name is not None
        value = read(name)
        if value.shape != empty[key].shape:
            raise BadWeights(
                problem=f"{name} has the shape {tuple(value.shape)}, not {tuple(empty[key].shape)}",
                advice="give the weights of this model",
            )
        values[key] = value.to("cpu", empty[key].dtype)
    for key, value in values.items():
        old = empty[key]
        if isinstance(old, nn.Parameter):
            torch.utils.swap_tensors(old, nn.Parameter(value, requires_grad=old.requires_grad))
        else:
            for registry, name in places[key]:
                registry[name] = value


def _reader(weights: Weights) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    """The names that there are, and what reads one of them."""
    if isinstance(weights, Mapping):
        return weights.keys(), weights.__getitem__
    if not isinstance(weights, str | PathLike):
        raise BadWeights(
            problem=f"they are a {type(weights).__name__}",
            advice="give the path of a safetensors file, or a mapping from names to tensors",
        )
    path = fspath(weights)
    try:
        from safetensors import safe_open
    except ImportError:
        raise BadWeights(
            problem=f"{path} cannot be read without safetensors",
            advice="pip install 'remat-offload[weights]', or give a mapping from names to tensors",
        ) from None
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:  # its own errors have no public base
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadWeights(
            problem=f"{path} cannot be read ({reason})", advice="give a safetensors file"
        ) from error
    names: Iterable[str] = file.keys()  # type: ignore[no-untyped-call]
    return frozenset(names), file.get_tensor
