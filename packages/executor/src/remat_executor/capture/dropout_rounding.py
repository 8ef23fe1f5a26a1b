"""Give captured dropout on CPU the rounding of eager.

Capture turns dropout into ``native_dropout``, which multiplies by the mask and then by the scale. Eager on
CPU multiplies by one noise tensor that already contains the scale, divided in the tensor's dtype. Where the
two scales differ (half precision; a few rates in float32, such as 0.15) the captured nodes are replaced.
"""

import torch
from torch import Tensor

from remat_executor.generator_state import replay


def noise_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout as eager computes it on CPU: the output, and the mask as bools."""
    noise = torch.empty_like(x).bernoulli_(1 - p)
    mask = noise.bool()
    return noise.div_(1 - p).mul_(x), mask


def drop_everything(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout with a rate of 1, which draws nothing: zeros with the signs of `x`, and the mask as bools."""
    return x.mul(0.0), torch.zeros_like(x, dtype=torch.bool)


def replay_noise_dropout(
    state: Tensor, device: str, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """`noise_dropout` from a generator state that was read."""
    result: tuple[Tensor, Tensor] = replay(state, device, noise_dropout, x, p, train)
    return result


def noise_dropout_backward(gradient: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of `noise_dropout`."""
    return mask.to(gradient.dtype).div_(1 - p).mul_(gradient)


def use_eager_rounding(graph: torch.fx.Graph) -> None:
    """Replace captured dropout that would round differently from eager, in place."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default):
        output, p = node.meta["val"][0], node.args[1]
        if p == 1.0:
            node.target = drop_everything  # eager draws nothing
            continue
        if output.device.type != "cpu" or p == 0.0 or _same_scale(p, output.dtype):
            continue
        masks = [user for user in node.users if user.args[1] == 1]
        backward = torch.ops.aten.native_dropout_backward.default
        uses = [use for mask in masks for use in mask.users]
        if not all(use.target is backward for use in uses):
            continue
        node.target = noise_dropout
        for use in uses:
            use.target = noise_dropout_backward
            use.args = (*use.args[:2], p)


def _same_scale(p: float, dtype: torch.dtype) -> bool:
    """Whether eager's scale, divided in the tensor's dtype, is the fused kernel's."""
    divided = torch.ones((), dtype=dtype).div_(1 - p)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return bool(divided.to(wide) == torch.tensor(1 / (1 - p), dtype=wide))
