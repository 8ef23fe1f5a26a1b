"""The backward of a convolution in two ops: the gradient of its input, and those of its weight and bias.

As captured, one call reads the gradient, the input and the weight, and makes all results at once. Its two
halves are independent kernels inside: the input's gradient depends on the input's shape only, and the
weight's gradient needs no memory for the other. As two ops, the input or the gradient may go in between. Both
halves read the gradient. A call that makes the input's gradient alone need not keep the input either.

The half that makes the input's gradient gets a tensor with the input's layout whose numbers are not read: a
view of the gradient where that is large enough, otherwise a tensor whose storage was emptied. Only oneDNN is
known not to touch such a tensor, and only if it does not copy it into another layout: otherwise the way
exists if the view is possible. All results were held bit by bit against the call on the CPU. This has not run
on a GPU.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.torch_private.convolutions import onednn_takes
from remat_executor.ways.substitution import Change, Substitution

aten = torch.ops.aten

LEAST_NBYTES = 1 << 16  # of an input for which there is a way


def convolutions(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each backward of a convolution that makes the input's gradient.

    Args:
        captured: the step.
        least_nbytes: convolutions with a smaller input are left alone.
    """
    calls = captured.graph_module.graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    )
    for node in calls:
        gradient, x, weight, bias, *rest, mask = args_of(node)
        made = {user.args[1]: user for user in node.users if is_item(user)}
        wanted = [place for place in range(3) if mask[place]]
        # The bias's gradient alone is made together with the weight's, which reads the input.
        if wanted not in ([0], [0, 1], [0, 1, 2]) or set(made) != set(wanted):
            continue
        fakes = [each.meta["val"] for each in (gradient, x, weight)]
        if fakes[1].nbytes < least_nbytes or not _has_stand_in(*fakes, bias, *rest):
            continue
        yield Substitution(family="convolutions", changes=_changes(node, made, tuple(mask)))


def _changes(node: Node, made: dict[Any, Node], mask: tuple[bool, ...]) -> tuple[Change, ...]:
    """First the weight's gradient, after which the input may be freed, then the input's."""
    gradient, x, weight, *rest, _ = args_of(node)
    constants = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in rest)
    given: Tensor = x.meta["val"]
    both = mask[1]
    of_input = Change(
        node=node,
        added=both,
        kernel=input_gradient,
        reads=(gradient, weight),
        constants=(tuple(given.shape), given.stride(), *constants),
        makes=(made[0],),
        flops=_flops(node, (True, False, False)),
    )
    if not both:
        return (of_input,)
    others = (False, *mask[1:])
    of_weight = Change(
        node=node,
        kernel=weight_gradient,
        reads=(gradient, x, weight),
        constants=(*constants, others),
        makes=tuple(made[place] for place in range(3) if others[place]),
        flops=_flops(node, others),
    )
    return (of_weight, of_input)


def _flops(node: Node, mask: tuple[bool, ...]) -> int:
    count = flop_registry[aten.convolution_backward]
    given = [each.meta["val"] if isinstance(each, Node) else each for each in node.args[:-1]]
    return int(count(*given, list(mask), out_val=node.meta["val"]))


def _has_stand_in(gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> bool:
    """Whether the input's gradient is made without memory for the input."""
    if not _is_dense(x) or x.dtype != gradient.dtype:
        return False
    return _fits(gradient, x.numel()) or _may_be_empty(x, weight, bias, *rest)


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill a part of the storage, each at a place of its own."""
    steps = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    return [stride for stride, _ in steps] == [prod(size for _, size in steps[:i]) for i in range(len(steps))]


def _fits(gradient: Tensor, numel: int) -> bool:
    """Whether a view of the gradient's storage can hold a dense tensor of the same dtype."""
    stored: int = gradient.untyped_storage().nbytes() // gradient.element_size()
    return numel <= stored - gradient.storage_offset()


def _may_be_empty(x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> bool:
    return x.device.type == "cpu" and onednn_takes(x, weight, bias, *rest)


def input_gradient(
    gradient: Tensor, weight: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], bias: Any, *rest: Any
) -> tuple[Tensor]:
    """The gradient of a convolution's input.

    Args:
        gradient: of the convolution's result.
        weight: of the convolution.
        shape: of the input.
        stride: of the input, which is dense.
        bias: the bias's shape, or None.
        *rest: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    if len(shape) == 3:
        # As the call does, but before anything stands in: a view of an emptied storage is refused.
        steps, padding, dilation, transposed, output_padding, groups = rest
        images = ((1, *steps), (0, *padding), (1, *dilation), transposed, (0, *output_padding), groups)
        rows = (gradient.unsqueeze(2), weight.unsqueeze(2))
        (made,) = input_gradient(*rows, *_as_image(shape, stride), bias, *images)
        return (made.squeeze(2),)
    x = _stand_in(gradient, weight, shape, stride, bias, *rest)
    made = aten.convolution_backward.default(gradient, x, weight, bias, *rest, (True, False, False))[0]
    return (made,)


def _as_image(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layout of `x.unsqueeze(2)`."""
    rows, channels, columns = shape
    return (rows, channels, 1, columns), (stride[0], stride[1], columns * stride[2], stride[2])


def _stand_in(
    gradient: Tensor, weight: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], bias: Any, *rest: Any
) -> Tensor:
    """A tensor with the input's layout, without memory of its own where that is possible."""
    if _fits(gradient, torch.Size(shape).numel()):
        return gradient.as_strided(shape, stride, gradient.storage_offset())
    x = gradient.new_empty_strided(shape, stride)
    # Asked at each call: another library, for which a flag may have been set since, would read the memory.
    if _may_be_empty(x, weight, bias, *rest):
        x.untyped_storage().resize_(0)
    return x


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of a convolution's weight, and of its bias if the mask asks for it.

    Args:
        gradient: of the convolution's result.
        x: the convolution's input.
        weight: of the convolution.
        bias: the bias's shape, or None.
        *rest: as for the input's gradient, and the mask of the results.
    """
    _, *made = aten.convolution_backward.default(gradient, x, weight, bias, *rest)
    return tuple(each for each in made if each is not None)
