"""Private names of the flags that set the precision of computations and choose kernels of attention."""

import contextlib
import functools
from collections.abc import Callable, Generator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat_executor.torch_private.lookup import private_name
from remat_graph.contexts import context

_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", kind) for kind in ("matmul", "conv", "rnn")),
    *(("mkldnn", kind) for kind in ("matmul", "conv", "rnn")),
)
KERNEL_FLAGS = (
    "deterministic_algorithms",
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled"),
    *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
)
"""Torch's names of the flags that choose kernels."""


def float32_precisions() -> dict[str, str]:
    """The float32 precision of each library: ``ieee``, ``tf32`` or ``bf16``.

    Torch's public getters fail if a user has set one library by itself.
    """
    return named_precisions(read_precisions())


def read_precisions() -> tuple[str, ...]:
    """The same as torch returns them, in a fixed order."""
    read = private_name("torch._C", "_get_fp32_precision_getter")
    return tuple(read(library, kind) for library, kind in _PRECISIONS)


def named_precisions(found: tuple[str, ...]) -> dict[str, str]:
    """By library what `read_precisions` returned."""
    return {
        f"{library}.{kind}": "ieee" if precision == "none" else precision
        for (library, kind), precision in zip(_PRECISIONS, found, strict=True)
    }


def read_kernel_flags() -> tuple[bool, ...]:
    """Torch's values of `KERNEL_FLAGS`."""
    return tuple(read() for read in _flag_readers())


@functools.cache
def _flag_readers() -> tuple[Callable[[], bool], ...]:
    """Torch's getters behind its public properties, which take several times as long: once a call."""
    return tuple(private_name("torch._C", f"_get_{name}") for name in KERNEL_FLAGS)


def attention_order(device: torch.device) -> str:
    """The order in which attention's kernels are considered, as it stands after the first selection."""
    select_attention(device)
    return str(private_name("torch._C", "_get_sdp_priority_order")())


def attention_preference() -> tuple[int, ...]:
    """The kernels of attention in torch's order, as values of `SDPBackend`."""
    return tuple(private_name("torch._C", "_get_sdp_priority_order")())


@functools.cache
def select_attention(device: torch.device) -> None:
    """Let torch select a kernel of attention on a device, once.

    At its first selection torch may set the order by what the device is: cuDNN comes first on Hopper. The
    order that was read before would not be the one of later calls.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device.type not in ("cpu", accelerator.type if accelerator is not None else "cpu"):
        return
    x = torch.empty(1, 1, 8, 8, device=device)
    # The slowest kernel takes any tensors; without it, none may be left, which is an error.
    with sdpa_kernel(SDPBackend.MATH), contextlib.suppress(NotImplementedError):  # a device without attention
        private_name("torch", "_fused_sdp_choice")(x, x, x)


@context
def with_autocast_for_cuda() -> Generator[None, None, None]:
    """Let autocast be switched on for CUDA on a machine without it, in any dtype."""
    common = torch.cuda.amp.common
    before = common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    try:
        common.amp_definitely_not_available = lambda: False
        torch.cuda.is_bf16_supported = lambda *_, **__: True
        yield
    finally:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = before


def without_any_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device."""
    guard: contextlib.AbstractContextManager[None] = private_name("torch._C", "_DisableAutocast")()
    return guard
