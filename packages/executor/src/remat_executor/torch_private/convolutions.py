"""The library that runs a convolution: torch chooses it by shapes, dtypes, devices and global flags."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from remat_executor.torch_private.lookup import private_name


def runs_in_onednn(x: Tensor, weight: Tensor, bias: Any, *arguments: Any) -> bool:
    """Whether a convolution and its backward run in oneDNN, by the flags of this moment.

    Args:
        x: the input; real or fake. Its numbers are not read.
        weight: of the convolution.
        bias: its shape, or None.
        *arguments: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    select = private_name("torch._C", "_select_conv_backend")
    with getattr(x, "fake_mode", None) or nullcontext():
        stride, padding, dilation, transposed, output_padding, groups = arguments
        lists = [list(each) for each in (stride, padding, dilation)]
        chosen = select(x, weight, None, *lists, transposed, list(output_padding), groups, bias)
    return bool(chosen == private_name("torch._C", "_ConvBackend").Mkldnn)
