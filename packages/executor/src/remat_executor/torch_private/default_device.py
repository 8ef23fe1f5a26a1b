"""Private names for a quick look at torch's default device."""

import torch

from remat_executor.torch_private.lookup import private_name

_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """`torch.get_default_device()`, which searches the modes that are active: without any, it is the CPU.

    It is read at each call of a module, and the search takes longer than the other flags together.
    """
    modes = private_name("torch._C", "_len_torch_function_stack")()
    chosen = getattr(private_name("torch", "_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    return _CPU if not modes and chosen is None else torch.get_default_device()
