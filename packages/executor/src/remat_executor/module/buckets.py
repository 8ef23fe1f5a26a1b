"""Round changing lengths up to a few buckets, so that N lengths need only as many plans as there are buckets.

    Buckets(sizes=(64, 128, 256), pad={"input_ids": 0, "attention_mask": 0, "labels": -100})

Named inputs are padded at the end of one dimension, each with its own value, up to the next bucket; outputs
are cut back to the true length, under autograd. Results stay exact only if the model ignores the padding, by
an attention mask and ignored labels for example: a batch norm, or a mean over all positions, includes it. So
nothing is padded unless asked for, and the user chooses the values.

Padded inputs and gradients of cut outputs are not part of the plan, like all tensors that the caller makes.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor, nn

from remat_executor.errors import BadInput
from remat_executor.torch_private.pytrees import flatten, unflatten
from remat_graph.errors import shown

Number = bool | int | float


def _as_tuple(given: Any) -> Any:
    return given if isinstance(given, str) or not hasattr(given, "__iter__") else tuple(given)


def _as_dict(pad: Any) -> Any:
    return dict(pad) if isinstance(pad, Mapping) else pad


@attrs.frozen(kw_only=True)
class Buckets:
    """The lengths to which inputs are padded, and the padding values.

    Attributes:
        sizes: the lengths, or one number to use its multiples. A longer call is planned at its own length.
        pad: for each input, by its name in the forward, the value to pad it with. Inputs that a call leaves
            out, or gives as None, are skipped; the others must have one length.
        dim: the dimension of these inputs that is padded, and of the outputs that is cut.
        cut: indices of the output tensors to cut back to the true length; None: all whose size at `dim` is
            the bucket's.

    Raises:
        BadInput: with what is wrong and what was expected.
    """

    sizes: int | tuple[int, ...] = attrs.field(converter=_as_tuple)
    pad: Mapping[str, Number] = attrs.field(converter=_as_dict)
    dim: int = 1
    cut: tuple[int, ...] | None = attrs.field(default=None, converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        given = self.sizes if isinstance(self.sizes, tuple) else (self.sizes,)
        if not given or not all(_is_count(size, 1) for size in given):
            _refuse(
                f"sizes {shown(self.sizes)}", "give lengths such as (64, 128, 256), or a multiple such as 64"
            )
        object.__setattr__(self, "sizes", tuple(sorted(given)) if isinstance(self.sizes, tuple) else given[0])
        if not isinstance(self.pad, dict) or not self.pad:
            _refuse(f"pad {shown(self.pad)}", 'name inputs and their values, as in pad={"input_ids": 0}')
        for name, value in self.pad.items():
            if not isinstance(name, str) or not isinstance(value, bool | int | float):
                _refuse(f"pad {{{shown(name)}: {shown(value)}}}", "give an input's name and a number")
        if not _is_count(self.dim, 0):
            _refuse(f"dim {shown(self.dim)}", "give a dimension counted from the front, such as 1")
        if self.cut is not None and not (
            isinstance(self.cut, tuple) and all(_is_count(place, 0) for place in self.cut)
        ):
            _refuse(f"cut {shown(self.cut)}", "give indices of output tensors, such as (1,), or None")

    def length(self, length: int) -> int:
        """The smallest bucket that holds a length, or the length itself beyond the largest bucket."""
        if isinstance(self.sizes, int):
            return -(-length // self.sizes) * self.sizes
        return next((size for size in self.sizes if size >= length), length)

    def padded(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], "Cut | None"]:
        """A call with padded inputs, and how to cut its outputs; None if nothing was padded.

        Raises:
            BadInput: none of the named inputs is given, or one cannot be padded.
        """
        places = self._places(module, args, kwargs)
        found = {name: args[place] if place is not None else kwargs[name] for name, place in places.items()}
        found = {name: tensor for name, tensor in found.items() if tensor is not None}
        if not found:
            _refuse(f"of {', '.join(self.pad)} none is among the inputs", "name inputs of the forward")
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.ndim <= self.dim:
                kind = f"{tensor.ndim}-dimensional" if isinstance(tensor, Tensor) else type(tensor).__name__
                _refuse(f"{name} is {kind}", f"name tensors that have a dimension {self.dim}")
        lengths = {name: tensor.shape[self.dim] for name, tensor in found.items()}
        if len(set(lengths.values())) > 1:
            _refuse(f"lengths differ at dimension {self.dim}: {lengths}", "name inputs of one length")
        length = next(iter(lengths.values()))
        size = self.length(length)
        if size == length:
            return args, kwargs, None
        filled, named = list(args), dict(kwargs)
        for name, tensor in found.items():
            longer = _lengthened(name, tensor, self.dim, size, self.pad[name])
            place = places[name]
            if place is None:
                named[name] = longer
            else:
                filled[place] = longer
        return tuple(filled), named, Cut(dim=self.dim, length=length, size=size, places=self.cut)

    def _places(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, int | None]:
        """The position of each named input, or None for a keyword."""
        positional = (
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        )
        places: dict[str, int | None] = dict(zip(positional, range(len(args)), strict=False))
        places.update(dict.fromkeys(kwargs))
        return {name: places[name] for name in self.pad if name in places}


@attrs.frozen(kw_only=True)
class Cut:
    """Cuts the outputs of a padded call back to their true length."""

    dim: int  # the dimension that was padded
    length: int  # the true length
    size: int  # the length of the bucket
    places: tuple[int, ...] | None  # indices of the output tensors to cut; None: all of the bucket's length

    def __call__(self, output: Any) -> Any:
        """Views of the outputs without the padding, so that gradients flow.

        Raises:
            BadInput: a named output does not have the bucket's length.
        """
        leaves, spec = flatten(output)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index, place in enumerate(tensors):
            leaf = leaves[place]
            fits = leaf.ndim > self.dim and leaf.shape[self.dim] == self.size
            if self.places is None:
                wanted = fits
            else:
                wanted = index in self.places
                if wanted and not fits:
                    _refuse(
                        f"output {index} has the shape {tuple(leaf.shape)}, not {self.size} at dimension "
                        f"{self.dim}",
                        "leave it out of cut=",
                    )
            if wanted:
                leaves[place] = leaf.narrow(self.dim, 0, self.length)
        if self.places is not None and (beyond := [i for i in self.places if i >= len(tensors)]):
            _refuse(f"cut names output {beyond[0]} of {len(tensors)}", "count the output tensors from 0")
        return unflatten(leaves, spec)


def _is_count(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _lengthened(name: str, tensor: Tensor, dim: int, size: int, value: Number) -> Tensor:
    """A tensor padded at the end of a dimension."""
    if isinstance(value, float) and not (tensor.is_floating_point() or tensor.is_complex()):
        _refuse(
            f"{name} holds {tensor.dtype}, which has no {shown(value)}", "give it a value of its own kind"
        )
    if tensor.dtype is torch.bool and not isinstance(value, bool) and value not in (0, 1):
        _refuse(f"{name} holds {tensor.dtype}, which has no {shown(value)}", "give it True or False")
    shape = (*tensor.shape[:dim], size - tensor.shape[dim], *tensor.shape[dim + 1 :])
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _refuse(problem: str, advice: str) -> NoReturn:
    raise BadInput(problem=f"buckets: {problem}", advice=advice)
