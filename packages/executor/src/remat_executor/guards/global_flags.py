"""Global flags of torch that choose kernels, and so affect costs, workspaces and captured graphs."""

import torch

from remat_executor.torch_private.precision import attention_order, float32_precisions

_TF32 = {"cuda.conv", "cuda.rnn"}  # where torch's own default is not IEEE


def unusual_flags() -> tuple[str, ...]:
    """A word for each flag that is not torch's default."""
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    flags = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "no_cudnn": not cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "no_onednn": not torch.backends.mkldnn.enabled,
        "no_flash_attention": not attention.flash_sdp_enabled(),
        "no_efficient_attention": not attention.mem_efficient_sdp_enabled(),
        "no_math_attention": not attention.math_sdp_enabled(),
        "no_cudnn_attention": not attention.cudnn_sdp_enabled(),
    }
    words = [word for word, on in flags.items() if on]
    for where, precision in float32_precisions().items():
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
        ("default_device", str(torch.get_default_device())),
    )
