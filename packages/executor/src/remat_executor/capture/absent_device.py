"""Trace a step for a CUDA device that this machine lacks.

Torch cannot trace with tensors on a device that is not there: autograd asks the driver for its streams, and a
build without CUDA ends the process. So tensors on the meta device stand for those of the device. The shapes
are inferred by the same rules; what depends on the device is decided here as torch decides it on CUDA:

* what the forward reads of devices, and the devices that it names;
* the kernel of attention, in torch's order of preference (on Hopper with a recent cuDNN, cuDNN comes first:
  ``sdpa_kernel([...], set_priority=True)`` sets another order);
* the kernel of batch norms;
* the dtypes of autocast;
* softmax of half precision to float32, which is one operator.

A device of compute capability 8.0 or newer is assumed. Recurrent layers are traced as without cuDNN.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from remat_executor.torch_private.dispatch import (
    attention_preference,
    autocast_operators,
    not_as_on_meta,
    with_meta_kernels,
)
from remat_executor.torch_private.pytrees import flatten, unflatten
from remat_graph.contexts import context

aten = torch.ops.aten
_META = torch.device("meta")
_HALVES = (torch.float16, torch.bfloat16)


class SeenDevice(TorchFunctionMode):
    """While active, tensors on the meta device say that they are on another one, and calls for it mean meta."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = torch.device(device.type, device.index or 0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the other device, or run a call on meta."""
        kwargs = dict(kwargs or {})
        if func in _QUESTIONS and args[0].is_meta:
            return _QUESTIONS[func](self.device)
        if func is Tensor.cuda:
            return args[0].to(_META)
        leaves, spec = flatten((args, kwargs))
        names = func is Tensor.to or "device" in kwargs
        args, kwargs = unflatten([self._on_meta(leaf, names) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def _on_meta(self, leaf: Any, names: bool) -> Any:
        named = names and isinstance(leaf, str) and leaf.partition(":")[0] == self.device.type
        device = isinstance(leaf, torch.device) and leaf.type == self.device.type
        return _META if named or device else leaf


_QUESTIONS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: device.index,
}


@context
def kernels_of_cuda() -> Generator[None, None, None]:
    """While active, a trace on the meta device gets the operators that eager runs on CUDA."""
    chosen: dict[Any, Callable[..., Any]] = {
        **dict.fromkeys(not_as_on_meta(), _default),
        aten.scaled_dot_product_attention.default: _attention,
        aten.softmax.int: _wide_softmax(aten._softmax.default),
        aten.log_softmax.int: _wide_softmax(aten._log_softmax.default),
    }
    casting = {
        operator: _autocast(operator, chosen.get(operator, _default)) for operator in autocast_operators()
    }
    available = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    bfloat16 = mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True)
    with available, bfloat16, with_meta_kernels({**chosen, **casting}):
        yield


def _default(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


# -- attention


def _attention(
    run: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The fused kernel that torch selects on CUDA, or attention from products and a softmax."""
    options = {"scale": scale}
    for backend in attention_preference():
        if not _takes(backend, query, key, value, attn_mask, is_causal, enable_gqa):
            continue
        if backend == SDPBackend.FLASH_ATTENTION.value:
            size = query.shape[-1]
            scale = size**-0.5 if scale is None else scale
            padded = (_padded(tensor) for tensor in (query, key, value))
            made = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )
            output: Tensor = made[0]
            return output[..., :size] if output.shape[-1] != size else output
        mask = _additive(attn_mask, query.dtype)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if backend == SDPBackend.EFFICIENT_ATTENTION.value:
            if mask is not None:
                aligned = _padded(mask)[..., : mask.shape[-1]]
                mask = aligned.expand(*query.shape[:-1], key.shape[-2])
            made = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, wanted, dropout_p, is_causal, **options
            )
        elif backend == SDPBackend.CUDNN_ATTENTION.value:
            made = aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, wanted, dropout_p, is_causal, False, **options
            )
        else:
            break
        found: Tensor = made[0]
        return found
    result: Tensor = run(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


def _takes(
    backend: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, gqa: bool
) -> bool:
    """Whether a kernel of attention is enabled and takes these tensors."""
    flags = torch.backends.cuda
    if backend == SDPBackend.MATH.value:
        return True
    if any(t.ndim != 4 or t.stride(-1) != 1 for t in (query, key, value)):
        return False
    sizes = {t.shape[-1] for t in (query, key, value)}
    half = query.dtype in _HALVES
    grouped = gqa or query.shape[1] != key.shape[1]
    if mask is not None and mask.requires_grad and backend != SDPBackend.EFFICIENT_ATTENTION.value:
        return False
    if backend == SDPBackend.FLASH_ATTENTION.value:
        square = not is_causal or query.shape[-2] == key.shape[-2]
        fits = len(sizes) == 1 and max(sizes) <= 256 and square
        return flags.flash_sdp_enabled() and half and mask is None and fits
    if backend == SDPBackend.EFFICIENT_ATTENTION.value:
        aligned = all(size * query.element_size() % 16 == 0 for size in sizes)
        known = half or query.dtype is torch.float32
        return flags.mem_efficient_sdp_enabled() and known and aligned and not grouped
    if backend == SDPBackend.CUDNN_ATTENTION.value:
        return flags.cudnn_sdp_enabled() and half and all(size % 8 == 0 and size <= 128 for size in sizes)
    return False


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask to add to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device))


def _padded(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension padded to a multiple of 8, as fused kernels require."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


# -- other operators


def _wide_softmax(fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softmax(
        run: Callable[..., Tensor], x: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        wide = x.dtype in _HALVES and dtype is torch.float32
        return fused(x, dim, True) if wide else run(x, dim, dtype)

    return softmax


def selects_cudnn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    train: bool,
    eps: float,
) -> bool:
    """Whether eager on CUDA runs cuDNN's kernel for a batch norm of these tensors."""
    half = x.dtype is torch.float16 and weight.dtype is torch.float32
    return (
        torch.backends.cudnn.enabled
        and (half or (x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)))
        and (mean is None) == (variance is None)
        and x.ndim >= 3
        and x.shape[0] <= (880801 if train else 65535)
        and x.numel() < 2**31 - 1
    )


# -- autocast

_FLOAT32 = frozenset(
    """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv
    exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm
    linalg_matrix_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm pdist poisson_nll_loss pow
    reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """.split()
)
"""What autocast on CUDA computes in float32, by torch's documentation of automatic mixed precision."""
_FLOAT32_RESULT = frozenset("cumprod cumsum linalg_vector_norm log_softmax prod softmax sum".split())
"""These convert while they read."""
_WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()
)
"""These compute in the widest dtype among their arguments."""
_REFUSED = frozenset({"binary_cross_entropy"})


def _autocast(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose arguments are cast as autocast does on CUDA, while that is on."""
    name = operator.overloadpacket.__name__

    def cast(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return kernel(run, *args, **kwargs)
        leaves, spec = flatten((args, dict(kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        given = [leaf for leaf in given if leaf.dtype is not torch.float64]
        dtype = torch.get_autocast_dtype("cuda")
        if name in _FLOAT32 or name.startswith("norm"):
            dtype = torch.float32
        elif name in _FLOAT32_RESULT:
            if any(t.dtype in _HALVES for t in given) and kwargs.get("dtype") is None:
                return _with_autocast_off(_named(operator, kernel, run), leaves, spec, torch.float32)
            given = []
        elif name in _WIDEST:
            dtype = torch.float32 if any(t.dtype is torch.float32 for t in given) else dtype
        elif name in _REFUSED:
            given = []
        ids = {id(t) for t in given}
        leaves = [leaf.to(dtype) if id(leaf) in ids else leaf for leaf in leaves]
        return _with_autocast_off(lambda *a, **k: kernel(run, *a, **k), leaves, spec, None)

    return cast


def _named(operator: Any, kernel: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """The call with the dtype of its result, at the dtype's place among the arguments."""
    place = [argument.name for argument in operator._schema.arguments].index("dtype")
    keyword = operator._schema.arguments[place].kwarg_only

    def call(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        if keyword:
            return kernel(run, *args, **kwargs, dtype=dtype)
        return kernel(run, *args[:place], dtype)

    return call


def _with_autocast_off(
    call: Callable[..., Any], leaves: list[Any], spec: Any, dtype: torch.dtype | None
) -> Any:
    off: AbstractContextManager[Any] = torch.autocast("cuda", enabled=False)
    args, kwargs = unflatten(leaves, spec)
    with off:
        return call(*args, **kwargs) if dtype is None else call(*args, dtype=dtype, **kwargs)
