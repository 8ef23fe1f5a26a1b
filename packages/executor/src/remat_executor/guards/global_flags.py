"""Global flags of torch that choose kernels, and so affect costs, workspaces and captured graphs."""

import functools

import torch

from remat_executor.torch_private.default_device import default_device
from remat_executor.torch_private.precision import (
    KERNEL_FLAGS,
    attention_order,
    named_precisions,
    read_kernel_flags,
    read_precisions,
)

_TF32 = {"cuda.conv", "cuda.rnn"}  # where torch's own default is not IEEE
_WORDS = {  # by torch's name of a flag the word for its unusual value, and the usual one
    "deterministic_algorithms": ("deterministic", False),
    "cudnn_enabled": ("no_cudnn", True),
    "cudnn_benchmark": ("cudnn_benchmark", False),
    "cudnn_deterministic": ("cudnn_deterministic", False),
    "mkldnn_enabled": ("no_onednn", True),
    "flash_sdp_enabled": ("no_flash_attention", True),
    "mem_efficient_sdp_enabled": ("no_efficient_attention", True),
    "math_sdp_enabled": ("no_math_attention", True),
    "cudnn_sdp_enabled": ("no_cudnn_attention", True),
}


def unusual_flags() -> tuple[str, ...]:
    """A word for each flag that is not torch's default."""
    return _unusual(read_kernel_flags(), read_precisions())


@functools.lru_cache(maxsize=8)
def _unusual(flags: tuple[bool, ...], precisions: tuple[str, ...]) -> tuple[str, ...]:
    """`unusual_flags` of these values, which seldom change between two calls of a module."""
    named = dict(zip(KERNEL_FLAGS, flags, strict=True))
    words = [word for name, (word, usual) in _WORDS.items() if named[name] is not usual]
    for where, precision in named_precisions(precisions).items():
        if precision != ("tf32" if where in _TF32 else "ieee"):
            words.append(f"{where}_{precision}")
    return tuple(words)


def global_flags(device: torch.device) -> tuple[tuple[str, str], ...]:
    """(name, value) of torch's global state that decides which kernels run."""
    autocast = "off"
    if torch.is_autocast_enabled(device.type):
        autocast = str(torch.get_autocast_dtype(device.type))
    return (
        ("autocast", autocast),
        ("kernels", " ".join(unusual_flags())),
        ("attention", attention_order(device)),
        ("threads", str(torch.get_num_threads()) if device.type == "cpu" else ""),
        ("default_dtype", str(torch.get_default_dtype())),
        ("default_device", str(default_device())),
    )
