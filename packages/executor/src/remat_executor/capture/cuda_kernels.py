"""Choose kernels as torch does on CUDA, for traces on a machine without it.

A device of compute capability 8.0 or newer, with cuDNN, is assumed. The kernels of attention are tried in
torch's order of preference: on Hopper with a recent cuDNN, cuDNN comes first, and so it does elsewhere after
``sdpa_kernel([...], set_priority=True)``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from remat_executor.torch_private.precision import attention_preference

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


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
            made = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
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
    masks = () if mask is None else (mask,)
    if any(t.ndim != 4 for t in (query, key, value)):
        return False
    if any(t.stride(-1) != 1 for t in (query, key, value, *masks)):
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
    return torch.where(mask, 0.0, aten.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device))


def _padded(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension padded to a multiple of 8, as fused kernels require."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _wide_softmax(fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softmax(run: Callable[..., Tensor], x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
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


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The output, and the inverse root mean square of each row in the dtype that sums have."""
    rows = [*x.shape[: x.ndim - len(normalized_shape)], *(1 for _ in normalized_shape)]
    wide = torch.float32 if x.dtype in _HALVES else x.dtype
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=wide)


FUSED: Mapping[Any, Callable[..., Any]] = {
    aten._fused_rms_norm.default: _rms_norm,
    aten.mish_backward.default: lambda gradient, x: torch.empty_like(x),
}
"""Meta kernels of the operators that are composed of others where a device has no kernel, as CUDA has."""

CHOSEN: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.softmax.int: _wide_softmax(aten._softmax.default),
    aten.log_softmax.int: _wide_softmax(aten._log_softmax.default),
}
"""Functions instead of overloads; each gets the overload's own kernel first."""
