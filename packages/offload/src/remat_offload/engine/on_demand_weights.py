"""Run the original module while its weights are on the host: each operator fetches the weights that it reads.

Where no plan applies (gradients off, hooks, ...) the original module runs, on inputs on the device. Inside
`OnDemandWeights`, every PyTorch function that receives a parameter placed on the host gets a copy on the
device instead. The lane that brings weights in training brings the copy; the copy is freed with its last use
by the function and the views that it returned. So inference holds one operator's weights at a time. With
gradients on, what autograd saves stays until the backward, and gradients of parameters on the host are copied
to the host.

A parameter that is asked for its device answers with the device of its copy. In-place writes are copied back
to the host; writes through ``data`` are not.

Imperfect: modules that behave differently under a ``TorchFunctionMode`` do so here. In inference
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` leave their fused kernels, which changes the last
bits. Code compiled by TorchScript is not intercepted.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DEVICE_QUERIES = {
    *(getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")),
    Tensor.get_device,
}
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")}
_SIZES = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
    *(Tensor.element_size, Tensor.storage_offset, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
}


class WeightFetcher(Protocol):
    """Fetches parameters that are placed on the host, and writes changes back."""

    @property
    def device(self) -> torch.device:
        """The device to which parameters are fetched."""
        ...

    def moves(self, param: nn.Parameter) -> bool:
        """Whether a parameter is placed on the host."""
        ...

    def fetch(self, param: nn.Parameter) -> Tensor:
        """Return a copy on the device, valid for compute issued from now on."""
        ...

    def write_back(self, param: nn.Parameter, fetched: Tensor) -> None:
        """Copy the values of a fetched copy back to the parameter."""
        ...


class OnDemandWeights(TorchFunctionMode):
    """Gives PyTorch functions device copies of the parameters among their arguments that are on the host."""

    def __init__(self, fetcher: WeightFetcher) -> None:
        super().__init__()
        self._fetcher = fetcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function on fetched copies."""
        kwargs = dict(kwargs or {})
        moved = dict.fromkeys(param for param in _params_in((args, kwargs)) if self._fetcher.moves(param))
        if not moved or func in _SIZES or (_is_accessor(func) and func not in _DEVICE_QUERIES | _VIEWS):
            return func(*args, **kwargs)
        if func in _DEVICE_QUERIES:
            return func(torch.empty(0, device=self._fetcher.device))
        # Version counters detect in-place writes; tensors made in inference mode have no counter.
        with torch.inference_mode(False):
            fetched = {param: self._fetched(param) for param in moved}
        versions = {param: copy._version for param, copy in fetched.items()}
        result = func(*_replaced(args, fetched), **_replaced(kwargs, fetched))
        for param, copy in fetched.items():
            if copy._version != versions[param]:
                self._fetcher.write_back(param, copy.detach())
        return result

    def _fetched(self, param: nn.Parameter) -> Tensor:
        if torch.is_grad_enabled() and param.requires_grad:
            copy: Tensor = _FetchedWeight.apply(param, self._fetcher)  # type: ignore[no-untyped-call]
            return copy
        return self._fetcher.fetch(param)


class _FetchedWeight(torch.autograd.Function):
    """Fetch a parameter; its gradient is copied to the parameter's device."""

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, fetcher: WeightFetcher) -> Tensor:
        ctx.device = param.device
        return fetcher.fetch(param)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.device), None


def _is_accessor(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def _params_in(value: Any) -> Iterator[nn.Parameter]:
    if type(value) is nn.Parameter:
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _params_in(item)
    elif type(value) is dict:
        yield from _params_in(list(value.values()))


def _replaced(value: Any, fetched: Mapping[nn.Parameter, Tensor]) -> Any:
    if type(value) is nn.Parameter:
        return fetched.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, fetched) for item in value)
    if type(value) is dict:
        return {name: _replaced(item, fetched) for name, item in value.items()}
    return value
