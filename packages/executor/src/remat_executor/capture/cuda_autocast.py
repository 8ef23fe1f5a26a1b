"""Cast the arguments of operators as autocast does on CUDA, for traces on a machine without it.

The lists are those of torch's documentation of automatic mixed precision; which operators are cast at all is
asked of the dispatcher. Tensors in float64 are not cast.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from remat_executor.torch_private.dispatch import argument_names, autocast_operators
from remat_executor.torch_private.pytrees import flatten, unflatten

Kernel = Callable[..., Any]

_FLOAT32 = (
    *("acos", "asin", "binary_cross_entropy_with_logits", "cdist"),
    *("cosh", "cosine_embedding_loss", "cosine_similarity", "dist"),
    *("erfinv", "exp", "expm1", "frobenius_norm"),
    *("group_norm", "hinge_embedding_loss", "huber_loss", "kl_div"),
    *("l1_loss", "layer_norm", "linalg_matrix_norm", "log"),
    *("log10", "log1p", "log2", "logsumexp"),
    *("margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("native_layer_norm", "nll_loss", "nll_loss2d", "nuclear_norm"),
    *("pdist", "poisson_nll_loss", "pow", "reciprocal"),
    *("renorm", "rms_norm", "rsqrt", "sinh"),
    *("smooth_l1_loss", "soft_margin_loss", "softplus", "tan"),
    *(
        "triplet_margin_loss",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_nearest_exact1d",
    ),
    *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d", "upsample_bilinear2d"),
    *("upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("upsample_trilinear3d",),
)
"""These compute in float32."""
_FLOAT32_RESULT = ("cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum")
"""These convert to float32 while they read, unless the call names a dtype."""
_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler"),
    *("index_put", "scatter_add", "tensordot", "vdot"),
)
"""These compute in the widest dtype among their arguments."""
_LEFT = ("binary_cross_entropy", "convolution", "_convolution")
"""Eager refuses the first; the others get their arguments from ``conv2d`` and its like, which are cast."""


def with_autocast(kernels: Mapping[Any, Kernel]) -> Mapping[Any, Kernel]:
    """The kernels of some overloads, and of those that autocast casts, which cast while autocast is on.

    Args:
        kernels: by overload; each gets the overload's own kernel first.
    """
    cast = [operator for operator in autocast_operators() if operator.overloadpacket.__name__ not in _LEFT]
    return {**kernels, **{operator: _casting(operator, kernels.get(operator, _own)) for operator in cast}}


def _own(run: Kernel, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _casting(operator: Any, kernel: Kernel) -> Kernel:
    name, names = operator.overloadpacket.__name__, argument_names(operator)

    def cast(run: Kernel, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return kernel(run, *args, **kwargs)
        if name in _FLOAT32_RESULT:
            place = names.index("dtype")
            named = kwargs.get("dtype", args[place] if len(args) > place else None)
            if named is None and _eligible(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        else:
            args, kwargs = _cast(name, args, kwargs)
        with torch.autocast("cuda", enabled=False):  # an operator that it calls is not cast
            return kernel(run, *args, **kwargs)

    return cast


def _cast(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    leaves, spec = flatten((args, dict(kwargs)))
    dtype = torch.get_autocast_dtype("cuda")
    wide = any(_eligible(leaf) and leaf.dtype is torch.float32 for leaf in leaves)
    if name in _FLOAT32 or name == "norm" or (name in _WIDEST and wide):
        dtype = torch.float32
    # From the last to the first, in the order of torch's own casts.
    cast = [leaf.to(dtype) if _eligible(leaf) else leaf for leaf in reversed(leaves)]
    args, kwargs = unflatten(cast[::-1], spec)
    return args, kwargs


def _eligible(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64
