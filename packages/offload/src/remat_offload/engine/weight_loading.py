"""Give a model its weights, from a file or a mapping, without a second copy of them.

What can be known from names and shapes is checked at first; the values are read one tensor at a time, when
there is a place for them. Parameters and buffers stay the objects that they are, so that an optimizer over
them, made before, trains them.
"""

from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath

import attrs
import torch
from torch import Tensor, nn

from remat_graph.errors import text_of
from remat_graph.serialization.pipes import is_pipe
from remat_offload.errors import BadWeights

Weights = str | PathLike[str] | Mapping[str, Tensor]


class WeightReader:
    """Weights that fit a model, to be read as its tensors get their places.

    Args:
        model: the module, on any device, the meta device too.
        weights: a safetensors file, or a mapping from names to tensors, each of which may be asked for twice;
            of tied tensors any name serves, and buffers that are not saved with a model may be named too.
            What is not named keeps the values that it has.

    Raises:
        BadWeights: a tensor without values is not named, one that is named has another shape, none is named,
            or they are of another kind.
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
                advice="give values for all; a mapping can have buffers that are not saved, by their names",
            )
        self._names = {tensor: name for tensor, name in found.items() if name is not None}
        if names and not self._names:
            raise BadWeights(
                problem="they name nothing of the model", advice="give the weights of this model"
            )
        for tensor, name in self._names.items():
            shape = self._source.shape(name)
            if shape != tuple(tensor.shape):
                raise BadWeights(
                    problem=f"{name} has the shape {shape}, not {tuple(tensor.shape)}",
                    advice="give the weights of this model",
                )

    def has(self, tensor: Tensor) -> bool:
        """Whether there are values for one of the model's tensors."""
        return tensor in self._names

    def read(self, tensor: Tensor, place: Tensor) -> None:
        """Bring the values of one of the model's tensors to a place, on its device and in its dtype."""
        with torch.no_grad():
            place.copy_(self._source.read(self._names[tensor]))


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Fill a model on the CPU.

    Args:
        model: the module.
        weights: as for `WeightReader`.

    Raises:
        BadWeights: they do not fit; nothing was changed.
    """
    reader = WeightReader(model, weights)
    for tensor in (*model.parameters(), *model.buffers()):
        if reader.has(tensor):
            place = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.data
            reader.read(tensor, place)
            rebind_storage(tensor, place)


def rebind_storage(tensor: Tensor, place: Tensor) -> None:
    """Let a tensor lie in other memory: the same object, with what is attached to it."""
    if not tensor.is_meta:
        tensor.data = place
        return
    # Torch sets `data` between devices with memory only. `place.data` counts writes by itself: updates of
    # the memory are no writes of a user's.
    there = place.data
    made = nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
    made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


@attrs.frozen
class _Source:
    """Names of tensors, and what tells the shape of one and reads it."""

    names: Iterable[str]
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
    if is_pipe(path):  # it would wait for one who writes
        raise BadWeights(problem=f"{path} is a pipe", advice="give a safetensors file")
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:  # its own errors have no public base
        reason = (text_of(error).splitlines() or [type(error).__name__])[0]
        raise BadWeights(
            problem=f"{path} cannot be read ({reason})", advice="give a safetensors file"
        ) from error
    names: Iterable[str] = file.keys()  # type: ignore[no-untyped-call]

    def shape(name: str) -> tuple[int, ...]:
        return tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    return _Source(frozenset(names), shape, file.get_tensor)
