"""The library that runs a convolution: torch chooses it by shapes, dtypes, devices and global flags."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from remat_executor.torch_private.lookup import private_name


def onednn_takes(x: Tensor, weight: Tensor, bias: Any, *arguments: Any) -> bool:
    """Whether a convolution and its backward run in oneDNN, and take the input as it lies in memory.

    By the flags of this moment. An input in another layout than the weight is copied first.

    Args:
        x: the input; real or fake. Its numbers are not read.
        weight: of the convolution.
        bias: its shape, or None.
        *arguments: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    select = private_name("torch._C", "_select_conv_backend")
    stride, padding, dilation, transposed, output_padding, groups = arguments
    lists = [list(each) for each in (stride, padding, dilation, output_padding)]
    with getattr(x, "fake_mode", None) or nullcontext():
        if x.ndim == 3:  # the call makes images of such inputs before it chooses
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
            lists = [[first, *each] for first, each in zip((1, 0, 1, 0), lists, strict=True)]
        chosen = select(x, weight, None, *lists[:3], transposed, lists[3], groups, bias)
        if chosen != private_name("torch._C", "_ConvBackend").Mkldnn:
            return False
        layout = private_name("torch._C", "_conv_determine_backend_memory_format")(x, weight, chosen)
        return x.is_contiguous(memory_format=layout)
