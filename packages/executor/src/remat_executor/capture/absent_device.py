"""Trace a step for a CUDA device that this machine lacks.

Torch cannot trace with tensors on a device that is not there: autograd asks the driver for its streams, and a
build without CUDA ends the process. So tensors on the meta device stand for those of the device. The shapes
are inferred by the same rules; what depends on the device is decided as torch decides it on CUDA:

* what the forward reads of devices, and the devices that it names;
* the kernel of attention and of batch norms, and what is one operator there: softmax of half precision to
  float32, RMS norms, the gradient of mish (`cuda_kernels`);
* the dtypes of autocast (`cuda_autocast`);
* which tensors have their channels last (`stride_rules`).

Recurrent layers are traced as without cuDNN.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat_executor.capture.cuda_autocast import with_autocast
from remat_executor.capture.cuda_kernels import CHOSEN, FUSED
from remat_executor.torch_private.dispatch import not_as_on_meta, registered_on_meta, with_meta_kernels
from remat_executor.torch_private.precision import with_autocast_for_cuda
from remat_executor.torch_private.pytrees import flatten, unflatten
from remat_graph.contexts import context

_META = torch.device("meta")


class SeenDevice(TorchFunctionMode):
    """While active, tensors on the meta device report another one, and calls that name that one use meta."""

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
        if func is torch.tensor and self._on_meta(kwargs.get("device"), True) is _META:
            # Torch makes it on the host and copies it, which a trace on meta would leave out.
            return func(*args, **{**kwargs, "device": "cpu"}).to(_META)
        if func is Tensor.__setitem__ and args[0].is_meta and isinstance(args[2], int | float | complex):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))  # on the host, as on CUDA
        leaves, spec = flatten((args, kwargs))
        names = func is Tensor.to or "device" in kwargs
        args, kwargs = unflatten([self._on_meta(leaf, names) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def _on_meta(self, leaf: Any, names: bool) -> Any:
        named = names and isinstance(leaf, str) and leaf.partition(":")[0] == self.device.type
        device = isinstance(leaf, torch.device) and leaf.type == self.device.type
        return _META if named or device else leaf


_QUESTIONS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: device.index,
}


@context
def kernels_of_cuda() -> Generator[None, None, None]:
    """While active, a trace on the meta device gets the operators that eager runs on CUDA."""
    own = [operator for operator in not_as_on_meta() if operator not in FUSED]
    kernels = {**dict.fromkeys(own, _own), **CHOSEN}
    with with_autocast_for_cuda(), registered_on_meta(FUSED), with_meta_kernels(with_autocast(kernels)):
        yield


def _own(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)
