"""The flags that a plan depends on are read quickly, and as torch's public functions show them."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat_executor.guards.global_flags import global_flags, unusual_flags
from remat_executor.torch_private.default_device import default_device

CPU = torch.device("cpu")


def test_each_flag_has_its_word() -> None:
    """Each alone, and none as torch starts."""
    assert unusual_flags() == ()
    with torch.backends.cudnn.flags(enabled=False):
        assert "no_cudnn" in unusual_flags()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert "cudnn_benchmark" in unusual_flags()
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert "cudnn_deterministic" in unusual_flags()
    torch.backends.mkldnn.set_flags(False)
    try:
        assert unusual_flags() == ("no_onednn",)
    finally:
        torch.backends.mkldnn.set_flags(True)
    with sdpa_kernel(SDPBackend.MATH):
        words = {"no_flash_attention", "no_efficient_attention", "no_cudnn_attention"}
        assert words == {word for word in unusual_flags() if "attention" in word}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert "no_math_attention" in unusual_flags()
    torch.use_deterministic_algorithms(True)
    try:
        assert unusual_flags() == ("deterministic",)
    finally:
        torch.use_deterministic_algorithms(False)
    assert unusual_flags() == ()


@pytest.mark.parametrize("name", ["cpu", "meta", "cpu:0"])
def test_the_default_device_is_torchs(name: str) -> None:
    """As a mode, and set for all."""
    assert default_device() == CPU
    with torch.device(name):
        assert default_device() == torch.get_default_device() == torch.device(name)
        assert dict(global_flags(CPU))["default_device"] == name
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        assert default_device() == torch.get_default_device() == torch.device(name)
    finally:
        torch.set_default_device(None)
    assert default_device() == before == CPU
