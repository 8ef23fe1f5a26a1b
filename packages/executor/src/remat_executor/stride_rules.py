"""Correct output layouts that torch's shape rules infer wrongly.

A trace infers strides and dtypes from rules, not from kernels. For the operators below the two differ where
an input is not contiguous or inputs differ in precision, as under autocast (torch 2.11 to 2.13 on CPU): a
batch norm of a transposed input has other strides, and the means of a half-precision layer norm with float32
weights are float32. Later ops of such a trace could not run. For these operators the kernel itself runs on
zeros, once for each layout.

So does any elementwise operator that makes images of one pixel or one channel. They are contiguous with
channels first and last, and the strides of their dimensions of size 1 decide which of them later operators
take, and the order in which dropout draws. By the rules tanh keeps those strides; its kernel makes new ones.

Where no kernel may run, because the device is not there or the model is too large for it, convolutions and
batch norms follow the rule of their kernels on CUDA; so do recurrent layers of cuDNN anywhere.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from remat_executor.fx_nodes import meta_tensors

aten = torch.ops.aten

_DEFAULTS = (
    *("_fft_r2c", "_log_softmax_backward_data", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *("batch_norm_backward", "channel_shuffle", "elu_backward", "hardswish_backward"),
    *("hardtanh_backward", "huber_loss_backward", "log_sigmoid_forward", "logaddexp", "logaddexp2"),
    *("max_unpool2d", "max_unpool3d", "mse_loss_backward", "native_batch_norm"),
    *("native_batch_norm_backward", "native_dropout_backward", "native_group_norm"),
    *("native_layer_norm", "native_layer_norm_backward", "reflection_pad2d_backward"),
    *("reflection_pad3d", "reflection_pad3d_backward", "replication_pad2d"),
    *("replication_pad2d_backward", "replication_pad3d", "replication_pad3d_backward"),
    *("smooth_l1_loss_backward", "softplus_backward", "special_xlog1py"),
)
UNRELIABLE = frozenset(
    {
        *(getattr(aten, name).default for name in _DEFAULTS),
        *(aten._native_batch_norm_legit.no_stats, aten.copysign.Tensor, aten.div.Tensor_mode),
        *(aten.ldexp.Tensor, aten.pow.Scalar, aten.xlogy.Tensor),
    }
)


_Layout = tuple[tuple[int, ...], torch.dtype]


class KernelLayouts:
    """Output layouts of kernels; operators run on real tensors within `real_mode()`, or not at all."""

    def __init__(self, real_mode: Callable[[], AbstractContextManager[Any]] | None) -> None:
        self._real_mode = real_mode
        self._known: dict[str, list[_Layout | None] | None] = {}

    def corrected(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        """The fake result of an operator with the strides and dtypes of its kernel."""
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if func is aten._cudnn_rnn.default:
            return _with_steps_outside(args, result)
        if self._real_mode is None:
            on_cuda = given and given[0].device.type in ("meta", "cuda")
            return _as_on_cuda(func, given, result) if on_cuda else result
        if func in UNRELIABLE:
            precisions = {t.dtype for t in given} - {torch.bool}  # a mask does not change a result's dtype
            if len(precisions) < 2 and all(t.is_contiguous() for t in given):
                return result
        elif not _is_elementwise(func) or not any(map(_has_two_layouts, meta_tensors(result))):
            return result
        key = repr((func, [_layout(a) for a in args], [(name, _layout(a)) for name, a in kwargs.items()]))
        if key not in self._known:
            self._known[key] = self._measured(func, args, kwargs)
        known = self._known[key]
        if known is None:
            return result

        def laid_out(fake: Any, layout: _Layout | None) -> Any:
            if not isinstance(fake, Tensor) or layout is None or (fake.stride(), fake.dtype) == layout:
                return fake
            stride, dtype = layout
            return fake.new_empty_strided(fake.shape, stride, dtype=dtype)

        return (
            laid_out(result, known[0]) if isinstance(result, Tensor) else tuple(map(laid_out, result, known))
        )

    def _measured(self, func: Any, args: Any, kwargs: Any) -> list[_Layout | None] | None:
        """The kernel's layouts, None for a result that it leaves out.

        Returns:
            None if it refuses these arguments, which measuring reports later.
        """
        assert self._real_mode is not None
        with self._real_mode():
            try:
                real = func(*map(_zeros, args), **{name: _zeros(a) for name, a in kwargs.items()})
            except RuntimeError:
                return None
            made = real if isinstance(real, tuple | list) else [real]
            return [(t.stride(), t.dtype) if isinstance(t, Tensor) else None for t in made]


def _is_elementwise(func: Any) -> bool:
    """Whether an operator of torch computes each element of a new tensor by itself, and draws nothing."""
    if func.namespace != "aten" or torch.Tag.pointwise not in func.tags:
        return False
    schema = func._schema
    aliases = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
    return not aliases and torch.Tag.nondeterministic_seeded not in func.tags


def _has_two_layouts(tensor: Tensor) -> bool:
    """Whether images are contiguous with channels first and last."""
    if tensor.ndim not in (4, 5) or not tensor.numel():
        return False
    last = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    return tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)


def _as_on_cuda(func: Any, given: list[Tensor], result: Any) -> Any:
    """The result of a batch norm or a convolution, its channels last if the arguments ask for that."""
    name = func.overloadpacket.__name__
    if "batch_norm" in name:
        given = given[1:2] if "backward" in name else given[:1]
    elif "convolution" in name and torch.backends.cudnn.enabled:
        given = given[1:3] if "backward" in name else given[:2]
    else:
        return result
    if not any(map(_channels_are_last, given)):
        return result
    if isinstance(result, Tensor):
        return _with_channels_last(result)
    return tuple(_with_channels_last(made) if isinstance(made, Tensor) else made for made in result)


def _with_steps_outside(args: tuple[Any, ...], result: Any) -> Any:
    """The results of a recurrent layer of cuDNN, which writes one step after the other."""
    batch_first, batch_sizes = args[10], args[14]
    output, *others = result
    return (steps_outside(output) if batch_first and not batch_sizes else output, *others)


def steps_outside(like: Tensor) -> Tensor:
    """A new tensor of a shape [batch, steps, ...] with the steps outside in memory."""
    return like.new_empty((like.shape[1], like.shape[0], *like.shape[2:])).transpose(0, 1)


def _channels_are_last(tensor: Tensor) -> bool:
    """Whether torch takes a tensor for one with its channels last; for images of one pixel, by strides."""
    if tensor.ndim not in (4, 5):
        return False
    least = 0
    for axis in (1, *range(tensor.ndim - 1, 1, -1), 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def _with_channels_last(fake: Tensor) -> Tensor:
    if fake.ndim not in (4, 5):
        return fake
    step, stride = fake.shape[1], [1]
    for size in reversed(fake.shape[2:]):
        stride.insert(1, step)
        step *= size
    return fake.new_empty_strided(fake.shape, (step, *stride), dtype=fake.dtype)


def _layout(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.device


def _zeros(argument: Any) -> Any:
    """A real tensor in the layout of a fake one."""
    if not isinstance(argument, Tensor):
        return argument
    elements = argument.untyped_storage().nbytes() // argument.element_size()
    storage = torch.zeros(elements, dtype=argument.dtype, device=argument.device)
    return storage.as_strided(argument.shape, argument.stride(), argument.storage_offset())
