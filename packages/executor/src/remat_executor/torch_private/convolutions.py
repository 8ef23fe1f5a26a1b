"""The library that runs a convolution: torch chooses it by shapes, dtypes, devices and global flags."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from remat_executor.torch_private.lookup import private_name


def runs_in_onednn(x: Tensor, weight: Tensor, *arguments: Any) -> bool:
    """Whether a convolution on the CPU without a bias runs in oneDNN, by the flags of this moment.

    Args:
        x: the input; real or fake. Its numbers are not read.
        weight: of the convolution.
        *arguments: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    select = private_name("torch._C", "_select_conv_backend")
    stride, padding, dilation, transposed, output_padding, groups = arguments
    lists = [list(each) for each in (stride, padding, dilation, output_padding)]
    with getattr(x, "fake_mode", None) or nullcontext():
        if x.ndim == 3:  # the call makes images of such inputs before it chooses
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
            lists = [[first, *each] for first, each in zip((1, 0, 1, 0), lists, strict=True)]
        chosen = select(x, weight, None, *lists[:3], transposed, lists[3], groups, None)
    kernels = private_name("torch._C", "_ConvBackend")
    if not transposed:
        return bool(chosen == kernels.Mkldnn)
    # Torch does not name oneDNN's transposed kernel to Python; these are all others on the CPU.
    return chosen not in (
        kernels.SlowTranspose2d,
        kernels.SlowTranspose3d,
        kernels.Empty,
        kernels.MkldnnEmpty,
    )
