"""Run the original of a model whose weights are on the host: each operator is lent those that it reads.

Where no plan can serve (gradients off, hooks, ...) the original module runs, on inputs on the device. While
that lasts, every function of PyTorch that is given a moved parameter gets a copy on the device in its place,
brought by the lane that brings weights in training; the copy goes when the function and the views that it
returned are through with it. So inference holds one operator's weights at a time. With gradients on,
what autograd saves stays until the backward, whose gradients go to the host, where their parameters are.

A parameter that is asked for its device says the one that it is lent to. What is written to it in place goes
home; what is written through its ``data`` does not.

Imperfect: modules that take another path where functions are watched take it here. In inference
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` leave their fused kernels, which changes last
bits. What TorchScript compiled is not seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WHERE = {getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")} | {Tensor.get_device}
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")}
_SIZES = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
    *(Tensor.element_size, Tensor.storage_offset, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
}


class WeightFetcher(Protocol):
    """Brings moved parameters, and takes home what was written to them."""

    @property
    def device(self) -> torch.device:
        """Where they are brought."""
        ...

    def moves(self, param: nn.Parameter) -> bool:
        """Whether a parameter is placed on the host."""
        ...

    def fetch(self, param: nn.Parameter) -> Tensor:
        """A copy of one that moves, on the device, for compute that is given from now on."""
        ...

    def write_back(self, param: nn.Parameter, lent: Tensor) -> None:
        """Let the parameter be what its copy is."""
        ...


class OnDemandWeights(TorchFunctionMode):
    """Within it functions of PyTorch are lent the moved parameters among their arguments.

    Args:
        fetcher: brings them.
    """

    def __init__(self, fetcher: WeightFetcher) -> None:
        super().__init__()
        self._fetcher = fetcher

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function on what is lent."""
        kwargs = dict(kwargs or {})
        moved = dict.fromkeys(param for param in _params_in((args, kwargs)) if self._fetcher.moves(param))
        if not moved or func in _SIZES or (_is_accessor(func) and func not in _WHERE | _VIEWS):
            return func(*args, **kwargs)
        if func in _WHERE:
            return func(torch.empty(0, device=self._fetcher.device))
        # What is written in place is told by its version, which tensors that inference mode makes lack.
        with torch.inference_mode(False):
            lent = {param: self._lent(param) for param in moved}
        versions = {param: there._version for param, there in lent.items()}
        result = func(*_swapped(args, lent), **_swapped(kwargs, lent))
        for param, there in lent.items():
            if there._version != versions[param]:
                self._fetcher.write_back(param, there.detach())
        return result

    def _lent(self, param: nn.Parameter) -> Tensor:
        if torch.is_grad_enabled() and param.requires_grad:
            lent: Tensor = _FetchedWeight.apply(param, self._fetcher)  # type: ignore[no-untyped-call]
            return lent
        return self._fetcher.fetch(param)


class _FetchedWeight(torch.autograd.Function):
    """A parameter on the host, read on the device."""

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, fetcher: WeightFetcher) -> Tensor:
        ctx.home = param.device
        return fetcher.fetch(param)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.home), None


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


def _swapped(value: Any, lent: Mapping[nn.Parameter, Tensor]) -> Any:
    if type(value) is nn.Parameter:
        return lent.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(_swapped(item, lent) for item in value)
    if type(value) is dict:
        return {name: _swapped(item, lent) for name, item in value.items()}
    return value
