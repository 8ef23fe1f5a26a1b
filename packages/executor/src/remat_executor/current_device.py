"""Make a device the current one of its kind while work is measured on it.

Kernels run on the device of their tensors, but events record on the current device's stream.
"""

import torch


def as_current(device: torch.device) -> torch.accelerator.device_index:
    """A context in which a device is the current one; for the CPU nothing changes."""
    return torch.accelerator.device_index(None if device.type == "cpu" else device.index)
