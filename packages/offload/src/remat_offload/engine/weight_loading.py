"""Load a model's weights from a file or a mapping, without a second copy of them.

Names and shapes are checked first; values are read one tensor at a time, directly into their memory.
Parameters and buffers stay the same objects, so that an optimizer created before still trains them.
"""

from collections.abc import Callable, Collection, Mapping
from os import PathLike, fspath

import attrs
import torch
from torch import Tensor, nn

from remat_graph.errors import text_of
from remat_graph.serialization.pipes import is_pipe
from remat_offload.errors import BadWeights

Weights = str | PathLike[str] | Mapping[str, Tensor]


class WeightReader:
    """Reads weights that fit a model, when its tensors get their memory.

    Args:
        model: the module, on any device, including the meta device.
        weights: a safetensors file, or a mapping from names to tensors, which may be read twice. Tied tensors
            need one of their names; non-persistent buffers may be named too. Tensors that are not named keep
            their values.

    Raises:
        BadWeights: a tensor on the meta device is not named, a named one has another shape, no tensor of the
            model is named, or `weights` is neither a path nor a mapping.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        names: dict[Tensor, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                names.setdefault(tensor, []).append(name)
        self._source = _source(weights)
        found = {
            tensor: next((n for n in known if n in self._source.names), None)
            for tensor, known in names.items()
        }
        missing = [names[tensor][0] for tensor, name in found.items() if name is None and tensor.is_meta]
        if missing:
            raise BadWeights(
                problem=f"they lack {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if missing[3:] else ""),
                advice="give values for all; a mapping may also name buffers that are not saved",
            )
        self._names = {tensor: name for tensor, name in found.items() if name is not None}
        if names and not self._names:
            raise BadWeights(
                problem="they name no tensor of the model", advice="give the weights of this model"
            )
        for tensor, name in self._names.items():
            shape = self._source.shape(name)
            if shape != tuple(tensor.shape):
                raise BadWeights(
                    problem=f"{name} has the shape {shape}, not {tuple(tensor.shape)}",
                    advice="give the weights of this model",
                )

    def has(self, tensor: Tensor) -> bool:
        """Whether the weights name one of the model's tensors."""
        return tensor in self._names

    def read(self, tensor: Tensor, destination: Tensor) -> None:
        """Copy the values of one of the model's tensors to a destination, on its device and in its dtype."""
        with torch.no_grad():
            destination.copy_(self._source.read(self._names[tensor]))


@attrs.frozen
class _Source:
    """Names of tensors, and functions that return the shape and the values of one."""

    names: Collection[str]
    shape: Callable[[str], tuple[int, ...]]
    read: Callable[[str], Tensor]


def _source(weights: Weights) -> _Source:
    if isinstance(weights, Mapping):
        return _Source(weights.keys(), lambda name: tuple(weights[name].shape), weights.__getitem__)
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
    if is_pipe(path):  # opening it would wait for a writer
        raise BadWeights(problem=f"{path} is a pipe", advice="give a safetensors file")
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:  # the errors of safetensors have no public base
        reason = (text_of(error).splitlines() or [type(error).__name__])[0]
        raise BadWeights(
            problem=f"{path} cannot be read ({reason})", advice="give a safetensors file"
        ) from error
    names = frozenset(file.keys())  # type: ignore[no-untyped-call]

    def shape(name: str) -> tuple[int, ...]:
        return tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    return _Source(names, shape, file.get_tensor)
