"""The backward of a convolution in two ops: the gradient of its input, and those of its weight and bias.

As captured, one call reads the gradient, the input and the weight, and makes all results at once. Its two
halves are independent kernels inside: the input's gradient depends on the input's shape only, and the
weight's gradient needs no memory for the other. As two ops, the input or the gradient may go in between. Both
halves read the gradient. A call that makes the input's gradient alone need not keep the input either.

The kernel of the call takes the input, but reads only its layout for the half that makes its gradient. Where
the gradient is at least as large, a view of it stands in. Elsewhere this half runs as what it is in
mathematics, the transposed convolution of the gradient: in 16-bit types oneDNN has one kernel for both, and
all bits are the same. In float32 two of 242 random cases differed, so there is no such way. All results were
held bit by bit against the call on the CPU. On a GPU, where this has not run, only the view is used.
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
from remat_executor.torch_private.convolutions import runs_in_onednn
from remat_executor.ways.substitution import Change, Kernel, Substitution

aten = torch.ops.aten

ONE_KERNEL = (torch.bfloat16, torch.float16)  # both halves of a convolution on the CPU, transposed or not
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
        gradient, x, weight, _, *rest, mask = args_of(node)
        made = {user.args[1]: user for user in node.users if is_item(user)}
        wanted = [place for place in range(3) if mask[place]]
        # The bias's gradient alone is made together with the weight's, which reads the input.
        if wanted not in ([0], [0, 1], [0, 1, 2]) or set(made) != set(wanted):
            continue
        kernel = kernel_of(*(each.meta["val"] for each in (gradient, x, weight)), *rest)
        if kernel is not None and x.meta["val"].nbytes >= least_nbytes:
            yield Substitution(family="convolutions", changes=_changes(node, kernel, made, tuple(mask)))


def _changes(node: Node, kernel: Kernel, made: dict[Any, Node], mask: tuple[bool, ...]) -> tuple[Change, ...]:
    """First the weight's gradient, after which the input may be freed, then the input's."""
    gradient, x, weight, *rest, _ = args_of(node)
    constants = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in rest)
    # What is given for the input is laid out as the input, the result as the call lays it out.
    laid_out: Tensor = (x if kernel is input_gradient else made[0]).meta["val"]
    both = mask[1]
    of_input = Change(
        node=node,
        added=both,
        kernel=kernel,
        reads=(gradient, weight),
        constants=(tuple(laid_out.shape), laid_out.stride(), *constants),
        makes=(made[0],),
        flops=_flops(node, (True, False, False)),
        part=True,
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
        part=True,
    )
    return (of_weight, of_input)


def _flops(node: Node, mask: tuple[bool, ...]) -> int:
    count = flop_registry[aten.convolution_backward]
    given = [each.meta["val"] if isinstance(each, Node) else each for each in node.args[:-1]]
    return int(count(*given, list(mask), out_val=node.meta["val"]))


def kernel_of(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Kernel | None:
    """What makes the input's gradient without memory for the input; None if nothing is known to.

    Args:
        gradient: of the convolution's result; real or fake, as the others.
        x: the convolution's input.
        weight: of the convolution.
        *rest: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    if not _is_dense(x) or x.dtype != gradient.dtype:
        return None
    stored: int = gradient.untyped_storage().nbytes() // gradient.element_size()
    if x.numel() <= stored - gradient.storage_offset():
        return input_gradient
    if x.device.type != "cpu" or x.dtype not in ONE_KERNEL or rest[3]:
        return None
    back = _backwards(tuple(gradient.shape), tuple(weight.shape), tuple(x.shape), *rest)
    onednn = runs_in_onednn(x, weight, *rest) and runs_in_onednn(gradient, weight, *back)
    return transposed_gradient if onednn else None


def _backwards(
    gradient: tuple[int, ...], weight: tuple[int, ...], x: tuple[int, ...], *rest: Any
) -> tuple[Any, ...]:
    """The arguments of the transposed convolution, from shapes and those of the convolution."""
    stride, padding, dilation, _, _, groups = rest
    reached = [
        (made - 1) * step - 2 * pad + apart * (size - 1) + 1
        for made, step, pad, apart, size in zip(
            gradient[2:], stride, padding, dilation, weight[2:], strict=True
        )
    ]
    beyond = [n - at for n, at in zip(x[2:], reached, strict=True)]  # pixels after the last window
    return stride, padding, dilation, True, beyond, groups


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill a part of the storage, each at a place of its own."""
    steps = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    return [stride for stride, _ in steps] == [prod(size for _, size in steps[:i]) for i in range(len(steps))]


def input_gradient(
    gradient: Tensor, weight: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], bias: Any, *rest: Any
) -> tuple[Tensor]:
    """The gradient of a convolution's input, by the kernel of the call.

    Args:
        gradient: of the convolution's result; its storage is at least as large as the input.
        weight: of the convolution.
        shape: of the input.
        stride: of the input, which is dense.
        bias: the bias's shape, or None.
        *rest: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    x = gradient.as_strided(shape, stride, gradient.storage_offset())  # its numbers are not read
    made = aten.convolution_backward.default(gradient, x, weight, bias, *rest, (True, False, False))
    return (made[0],)


def transposed_gradient(
    gradient: Tensor, weight: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], bias: Any, *rest: Any
) -> tuple[Tensor]:
    """`input_gradient` of a plain convolution, by the transposed convolution of the gradient.

    Args: as for `input_gradient`; `stride` is of the result.
    """
    back = _backwards(tuple(gradient.shape), tuple(weight.shape), shape, *rest)
    made = aten.convolution.default(gradient, weight, None, *back)
    return (made if made.stride() == stride else made.new_empty_strided(shape, stride).copy_(made),)


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
