"""A model with stand-ins for its tensors, so that it can be traced for a device that does not hold it.

Stand-ins have the layout of what they stand for, are on the device that is planned for, and have no memory.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor.inspection.tensors import Tensors, collect
from remat_executor.torch_private.fake_tensors import fake_tensors
from remat_executor.torch_private.pytrees import flatten, unflatten
from remat_graph.contexts import context


@context
def with_fake_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Generator[Tensors, None, None]:
    """Within it the model has stand-ins for its parameters and buffers, and a call of it has for its inputs.

    Args:
        model: the module, on any device.
        args: positional inputs, on any device.
        kwargs: keyword inputs.
        device: where the stand-ins are.

    Returns:
        The tensors of the model and of the call.
    """
    with fake_tensors() as fake:

        def make_fake(tensor: Tensor) -> Tensor:
            return fake(tensor, device)

        with _replaced_tensors(model, make_fake):
            leaves, spec = flatten((args, dict(kwargs)))
            made = {id(leaf): make_fake(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            leaves = [made.get(id(leaf), leaf) for leaf in leaves]  # what is given twice is one input
            args, kwargs = unflatten(leaves, spec)
            yield collect(model, args, kwargs)


@context
def _replaced_tensors(model: nn.Module, make_fake: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """The model with other tensors in the place of its parameters and buffers; tied ones stay tied."""
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
