"""Check that this machine has a device before anything is asked of it."""

import torch

from remat_executor.errors import BadInput

_EVERYWHERE = ("cpu", "meta")


def check_device(device: torch.device) -> None:
    """Check that torch can work on a device.

    Where torch lacks the device, its functions fail in ways of their own: an index out of range, or the end
    of the process, since nothing can switch to such a device.

    Raises:
        BadInput: this machine, or this build of torch, does not have it.
    """
    if device.type in _EVERYWHERE:
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if accelerator is None or device.type != accelerator.type:
        found = f"{accelerator.type} and the CPU" if accelerator is not None else "the CPU only"
        raise BadInput(
            problem=f"the device is {device}, and torch {torch.__version__} finds {found} on this machine",
            advice="use a device that is there, or install a build of torch and a driver for this one",
        )
    if device.index is not None and device.index >= count:
        raise BadInput(
            problem=f"the device is {device}, and this machine has {count} of that type",
            advice=f"use an index below {count}",
        )
