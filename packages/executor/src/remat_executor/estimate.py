"""The graph of a training step from shapes alone: of a model on the meta device, or too large for here.

Parameters, buffers and inputs are stood in for by fake tensors of the device to plan for, so nothing of their
size is allocated and nothing is run. Times are a platform's. Scratch memory of kernels is not known without
running them: it is left out, and where it matters a budget wants some reserve. The graph is the one that this
build of torch traces for that device: a CPU's is an estimate of a GPU's.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.capture import capture
from remat_executor.costs import op_cost
from remat_executor.errors import BadInput
from remat_executor.tensors import collect
from remat_executor.translate import translate
from remat_graph import Graph
from remat_graph.platform import Platform, with_platform


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

    def stand_in(tensor: Tensor) -> Tensor:
        return fake(tensor, place)

    with torch_private.fake_tensors() as fake, _stood_in(model, stand_in):
        leaves, spec = torch_private.flatten((args, dict(kwargs)))
        leaves = [stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = torch_private.unflatten(leaves, spec)
        tensors = collect(model, args, kwargs)
        captured = capture(model, tensors, differentiate=differentiate)
        conditions = (("estimate", place.type), ("training", str(model.training)))
        found = translate(captured, tensors, name=type(model).__name__, conditions=conditions)
    costs = {
        (i, k): op_cost(recipe, found.graph, i, k)
        for i, recipe in enumerate(found.recipes)
        for k in range(len(found.graph.ops[i].implementations))
    }
    return with_platform(found.graph, costs, platform)


@contextlib.contextmanager
def _stood_in(model: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> Iterator[None]:
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
                        fake = stand_in(tensor)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = fake
                    registry[name] = made[id(tensor)]
        yield
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor
