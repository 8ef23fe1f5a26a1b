"""Know the operators that may give other last bits at each run: their kernels add atomically, in any order.

A repeat of such an operator would not recompute what its first run has computed, so it runs once. The list is
torch's own, in the documentation of `torch.use_deterministic_algorithms`, with attention's backwards, which
its kernels warn about, and cuDNN's recurrent layers, of which the notes on reproducibility warn. On the CPU
these operators repeat their bits. Operators of other libraries are not known here.
"""

import torch
from torch.fx import Node

from remat_executor.capture.recurrent import cudnn_rnn_backward
from remat_executor.fx_nodes import meta_tensors, operator_of

_CONVOLUTIONS = frozenset({"convolution_backward", "cudnn_convolution_transpose", "slow_conv_transpose2d"})
"""Exact if the flag of cuDNN says so; and so is a transposed `convolution`."""
_BACKWARDS = [
    "avg_pool3d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "ctc_loss",
    "efficient_attention",
    "embedding_bag",
    "embedding_bag_dense",
    "embedding_dense",
    "flash_attention",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "miopen_rnn",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_flash_attention",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "cudnn_rnn",
]
_OTHERS = [
    "bincount",
    "cudnn_rnn",
    "cumsum",
    "histc",
    "index_add",
    "index_copy",
    "index_put",
    "unsafe_index_put",
    "index_reduce",
    "max_unpool2d",
    "max_unpool3d",
    "median",
    "nanmedian",
    "nll_loss2d_forward",
    "put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
]
_VARYING = frozenset(_OTHERS) | {f"{name}_backward" for name in _BACKWARDS}


def may_vary(node: Node, device: torch.device) -> bool:
    """Whether an operator may give other bits when it runs again on the same inputs.

    Args:
        node: the operator, with its fake result.
        device: where it runs. Torch's flags of determinism are those of now, on which a plan depends.
    """
    if device.type != "cuda":
        return False
    if torch.get_deterministic_debug_mode() == 2:  # 1 only warns about operators that vary
        return False
    flattened = node.target is cudnn_rnn_backward
    operator = torch.ops.aten._cudnn_rnn_backward.default if flattened else operator_of(node)
    if getattr(operator, "namespace", "") != "aten" or not _sums_are_rounded(node):
        return False
    name = operator.overloadpacket.__name__.strip("_")
    transposed = name == "convolution" and node.args[6] is True
    if transposed or name in _CONVOLUTIONS:
        return not torch.backends.cudnn.deterministic
    return name in _VARYING


def _sums_are_rounded(node: Node) -> bool:
    """Whether the order of additions can be seen in a result: sums of integers are exact."""
    tensors = meta_tensors(node.meta["val"])
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
