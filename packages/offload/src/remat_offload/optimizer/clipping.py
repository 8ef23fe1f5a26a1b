"""`Clipping` computes norms during the backward, and scales gradients when the step reads them.

A gradient on the host is complete before the backward ends, so its norm can be computed meanwhile. `Clipping`
learns which norm is needed, and after how many backwards: from the first clipping on, the CPU's lane computes
a gradient's norm as soon as as many gradients were added up as at the latest clipping. The result is used
only if the gradient is still the same tensor, unwritten since, and the kernel had as many threads as the
caller's would have: so the result is bit-identical to torch's. Otherwise the norm is recomputed.

The update that reads a gradient on the host also scales it, chunk by chunk. Until then the parameter is
pending (`pending_parameters`), and a read of its gradient scales it first. A tensor that was taken from
``.grad`` before the clipping is scaled once the update is done.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remat_executor.torch_private.tensors import past_torch_function
from remat_offload.copy_lanes.machine import Machine, Ticket
from remat_offload.copy_lanes.optimizer_threads import kernel_threads
from remat_offload.deferred_signals import uninterrupted
from remat_offload.host_memory.pool import Event


@attrs.frozen(eq=False)
class _PendingNorm:
    """The norm of a gradient that the CPU's lane computes."""

    grad: "weakref.ref[Tensor]"  # only its parameter keeps it alive
    version: int  # of the gradient
    norm_type: float
    ticket: Ticket
    found: list[tuple[Tensor, int]]  # the norm and the threads of its kernel, once the work is done

    def norm_of(self, grad: Tensor, norm_type: float) -> Tensor | None:
        """Return the norm if it is valid for the current gradient."""
        known = (self.version, self.norm_type) == (grad._version, norm_type) and self.grad() is grad
        if not known:
            return None
        self.ticket.synchronize()
        norm, threads = self.found[0]
        return norm if threads == torch.get_num_threads() else None


@attrs.frozen(eq=False)
class _DeferredScaling:
    """The deferred scaling of a gradient: to wait for it is to do it."""

    clipping: "Clipping"
    param: nn.Parameter

    def query(self) -> bool:
        """Whether it is done."""
        return self.param not in self.clipping._scales

    def synchronize(self) -> None:
        """Scale the gradient."""
        self.clipping.scale(self.param)


class Clipping:
    """Norms and scales of the gradients of one model.

    The CPU lane of `machine` computes the norms; `mark_pending` makes readers of a parameter wait for work.
    """

    def __init__(self, machine: Machine, mark_pending: Callable[[nn.Parameter, Event], None]) -> None:
        self.machine, self._mark_pending = machine, mark_pending
        self._norm_type: float | None = None  # of the latest clipping; None before the first
        self._threads = 1  # of the kernels of the thread that clipped
        self._times = 1  # the number of gradients added up for it
        self._added: Counter[Tensor] = Counter()
        self._norms: dict[Tensor, _PendingNorm] = {}
        self._scales: dict[nn.Parameter, Tensor] = {}
        self._copies: dict[Tensor, Ticket] = {}  # of the latest gradients
        self._hooks: dict[Tensor, RemovableHandle] = {}

    def clip(
        self,
        params: Sequence[nn.Parameter],
        on_host: Sequence[nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> Tensor:
        """Do what `torch.nn.utils.clip_grad_norm_` does; gradients on the host are scaled later.

        The norms of `params` are combined in their order; `on_host` are those of them placed on the host. The
        other arguments and the result are torch's.

        Raises:
            RuntimeError: torch's error for a norm that is not finite.
            LaneFailed: a norm could not be computed.
        """
        norm_type = float(norm_type)
        grads = {param: param.grad for param in params if param.grad is not None}
        # The norm of one number is its absolute value, so a norm can replace its tensor.
        norms = [self._known(param, grad, norm_type) for param, grad in grads.items()]
        norm = torch.nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
        self._learn(on_host, norm_type)
        later = [param for param in on_host if param in grads]
        now = grads.keys() - set(later)
        torch.nn.utils.clip_grads_with_norm_([p for p in params if p in now], max_norm, norm, foreach)
        scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0).to("cpu")
        for param in later:
            self._scales[param] = scale
            self._mark_pending(param, _DeferredScaling(self, param))
        return norm

    def take_scale(self, param: nn.Parameter) -> Tensor | None:
        """Return the factor for the gradient in an update that begins now, and take it over."""
        return self._scales.pop(param, None)

    def scale(self, param: nn.Parameter) -> None:
        """Scale a gradient now, if its scaling was deferred."""
        if param not in self._scales:
            return
        with uninterrupted(), torch.no_grad(), past_torch_function():
            scale = self._scales.pop(param)
            if param.grad is not None:
                param.grad.mul_(scale)

    def scale_all(self) -> None:
        """Do all deferred scalings now."""
        for param in [*self._scales]:
            self.scale(param)

    def before_adding(self, param: nn.Parameter, copy: Ticket) -> None:
        """Finish pending work on a gradient before another one is added to it, which a copy brings."""
        self._copies[param] = copy
        pending = self._norms.pop(param, None)
        if pending is not None:
            pending.ticket.wait()
        self.scale(param)

    def forget(self) -> None:
        """Forget norms and scales: the gradients are dropped, or have been used."""
        self._added.clear()
        self._norms.clear()
        self._scales.clear()
        self._copies.clear()

    def close(self) -> None:
        """Do deferred scalings and remove the hooks of parameters."""
        self.scale_all()
        self.forget()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _known(self, param: nn.Parameter, grad: Tensor, norm_type: float) -> Tensor:
        """Return the norm of a gradient if it is known, else the gradient."""
        pending = self._norms.get(param)
        norm = None if pending is None else pending.norm_of(grad, norm_type)
        return grad if norm is None else norm

    def _learn(self, on_host: Sequence[nn.Parameter], norm_type: float) -> None:
        self._norm_type, self._threads = norm_type, torch.get_num_threads()
        self._times = max(self._added.values(), default=1)
        me = weakref.WeakMethod(self._arrived)  # the user's parameters may outlive this object

        def arrived(param: Tensor) -> None:
            method = me()
            if method is not None:
                method(param)

        for param in on_host:
            if param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, param: Tensor) -> None:
        """Compute the norm of a gradient on the host if it is complete now."""
        self._added[param] += 1
        with past_torch_function():  # its bytes may be on their way
            grad, norm_type = param.grad, self._norm_type
        if grad is None or norm_type is None or self._added[param] < self._times:
            return
        if norm_type == 0 or grad.is_complex():  # norms that cannot replace their tensor
            return
        found: list[tuple[Tensor, int]] = []
        threads = self._threads

        def compute_norm() -> None:
            with torch.no_grad(), kernel_threads(threads):  # sums depend on them
                norm = torch.nn.utils.get_total_norm([grad], norm_type)
                found.append((norm, torch.get_num_threads()))

        copy = self._copies.get(param)
        ticket = self.machine.work(
            compute_norm, [] if copy is None else [copy], name="the norm of a gradient"
        )
        self._norms[param] = _PendingNorm(weakref.ref(grad), grad._version, norm_type, ticket, found)
        assert isinstance(param, nn.Parameter)
        self._mark_pending(param, ticket)
