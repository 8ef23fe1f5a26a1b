"""Trace a model for a device that does not hold it, with fake tensors instead of its own.

A fake tensor has the layout of the original one, is on the planned device, and has no memory.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.inspection.tensors import Tensors, collect
from remat_executor.torch_private.fake_tensors import fake_tensors
from remat_executor.torch_private.pytrees import flatten, unflatten
from remat_graph.contexts import context


@context
def with_fake_tensors(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    numbers: frozenset[int] = frozenset(),
) -> Generator[Tensors, None, None]:
    """A context in which fake tensors on `device` replace a model's parameters, buffers and inputs.

    Args:
        model: the module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        device: of the fake tensors.
        numbers: see `Tensors`.

    Returns:
        The fake tensors of the model and of the call.
    """
    with fake_tensors() as fake:

        def make_fake(tensor: Tensor) -> Tensor:
            return fake(tensor, device)

        with _replaced_tensors(model, make_fake):
            leaves, spec = flatten((args, dict(kwargs)))
            made = {id(leaf): make_fake(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            # A tensor that is given twice is one input.
            args, kwargs = unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)
            yield attrs.evolve(collect(model, args, kwargs), numbers=numbers)


@context
def _replaced_tensors(model: nn.Module, make_fake: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """A context in which other tensors replace the model's parameters and buffers; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    before: list[tuple[Any, str, Tensor]] = []
    try:
        for module in model.modules():
            registries: tuple[Any, ...] = (module._parameters, module._buffers)
            for registry in registries:
                for name, tensor in registry.items():
                    if tensor is None:
                        continue
                    before.append((registry, name, tensor))
                    if id(tensor) not in made:
                        fake = make_fake(tensor)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = fake
                    registry[name] = made[id(tensor)]
        yield
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor
