"""Clipping that overlaps: norms are taken beside the backward, gradients are scaled as the step reads them.

A gradient on the host is there before the backward ends, so its norm can be taken while the rest is made.
Which norm will be asked for, and after how many backwards, is learned: from the first clipping on, a
gradient's norm is taken on the CPU's lane as soon as as many are added up as were at the latest clipping.
What the lane has found is used only while the gradient is the tensor that it was, unwritten since, and the
kernel had as many threads as the caller's: so the bits are torch's, and where anything differs the norm is
taken anew.

The gradients on the host are scaled piece by piece by the update that reads them. Whoever asks a parameter
for its gradient before that finds it scaled: the parameter is in flight until then (`pending_parameters`).
A tensor that was taken from ``.grad`` before the clipping shows it once the update is done.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remat_executor.torch_private.tensors import past_torch_function
from remat_offload.deferred_signals import uninterrupted
from remat_offload.host_memory.pool import Event
from remat_offload.machine.base import Machine, Ticket


@attrs.frozen(eq=False)
class _PendingNorm:
    """The norm of a gradient, or what will be.

    Attributes:
        grad: whose, which is kept alive by its parameter alone.
        version: how often that had been written.
        norm_type: which norm.
        ticket: the work.
        found: the norm and the threads that its kernel had, once the work is done.
    """

    grad: "weakref.ref[Tensor]"
    version: int
    norm_type: float
    ticket: Ticket
    found: list[tuple[Tensor, int]]

    def norm_of(self, grad: Tensor, norm_type: float) -> Tensor | None:
        """The norm, if it is this one's as it is now."""
        known = (self.version, self.norm_type) == (grad._version, norm_type) and self.grad() is grad
        if not known:
            return None
        self.ticket.synchronize()
        norm, threads = self.found[0]
        return norm if threads == torch.get_num_threads() else None


@attrs.frozen(eq=False)
class _DeferredScaling:
    """The scaling of a gradient that was put off: who waits for it does it."""

    clipping: "Clipping"
    param: nn.Parameter

    def query(self) -> bool:
        """Whether it is done."""
        return self.param not in self.clipping._scales

    def synchronize(self) -> None:
        """Do it."""
        self.clipping.scale(self.param)


class Clipping:
    """Norms and scales of the gradients of one model.

    Args:
        machine: its lane for the CPU takes the norms.
        mark_pending: makes whoever reads a parameter wait for something first.
    """

    def __init__(self, machine: Machine, mark_pending: Callable[[nn.Parameter, Event], None]) -> None:
        self.machine, self._mark_pending = machine, mark_pending
        self._norm_type: float | None = None  # of the latest clipping; None: there was none
        self._times = 1  # gradients that were added up for it
        self._added: Counter[Tensor] = Counter()
        self._taken: dict[Tensor, _PendingNorm] = {}
        self._scales: dict[Tensor, Tensor] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}

    def clip(
        self,
        params: Sequence[nn.Parameter],
        on_host: Sequence[nn.Parameter],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does; what is on the host is scaled later.

        Args:
            params: in the order in which their norms are put together.
            on_host: those of them that are at home there.
            max_norm: the largest norm that gradients may have together.
            norm_type: which norm.
            error_if_nonfinite: whether a norm that is not finite is an error; nothing is scaled then.
            foreach: as for torch's.

        Returns:
            the norm before, without dimensions.

        Raises:
            RuntimeError: torch's, for a norm that is not finite.
            LaneFailed: a norm could not be taken.
        """
        norm_type = float(norm_type)
        grads = {param: param.grad for param in params if param.grad is not None}
        # The norm of one number is its absolute value, so that a norm can stand for its tensor.
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

    def scale_of(self, param: nn.Parameter) -> Tensor | None:
        """What the update of a parameter, which begins now, is to multiply its gradient with."""
        return self._scales.pop(param, None)

    def scale(self, param: nn.Parameter) -> None:
        """Scale a gradient now, if that was put off."""
        if param not in self._scales:
            return
        with uninterrupted(), torch.no_grad(), past_torch_function():
            scale = self._scales.pop(param)
            if param.grad is not None:
                param.grad.mul_(scale)

    def scale_all(self) -> None:
        """Scale all gradients now for which that was put off."""
        for param in [*self._scales]:
            assert isinstance(param, nn.Parameter)
            self.scale(param)

    def before_adding(self, param: nn.Parameter) -> None:
        """A gradient is about to be added to a parameter's: whatever was to read or to scale that is done."""
        taken = self._taken.pop(param, None)
        if taken is not None:
            taken.ticket.wait()
        self.scale(param)

    def forget(self) -> None:
        """The gradients go, or have been used."""
        self._added.clear()
        self._taken.clear()
        self._scales.clear()

    def close(self) -> None:
        """Leave parameters as they were before: nothing watches them, and what was put off is done."""
        self.scale_all()
        self.forget()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _known(self, param: nn.Parameter, grad: Tensor, norm_type: float) -> Tensor:
        """The norm of a gradient if it is known, else the gradient."""
        taken = self._taken.get(param)
        norm = None if taken is None else taken.norm_of(grad, norm_type)
        return grad if norm is None else norm

    def _learn(self, on_host: Sequence[nn.Parameter], norm_type: float) -> None:
        self._norm_type = norm_type
        self._times = max(self._added.values(), default=1)
        me = weakref.WeakMethod(self._arrived)  # the parameters are the user's and may outlive this

        def arrived(param: Tensor) -> None:
            method = me()
            if method is not None:
                method(param)

        for param in on_host:
            if param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, param: Tensor) -> None:
        """A gradient has been added to a parameter's, which is on the host."""
        self._added[param] += 1
        grad, norm_type = param.grad, self._norm_type
        if grad is None or norm_type is None or self._added[param] < self._times:
            return
        if norm_type == 0 or grad.is_complex():  # a count's count is another; a complex number's norm is real
            return
        found: list[tuple[Tensor, int]] = []

        def take() -> None:
            with torch.no_grad():
                norm = torch.nn.utils.get_total_norm([grad], norm_type)
                found.append((norm, torch.get_num_threads()))

        ticket = self.machine.work(take, name="the norm of a gradient")
        self._taken[param] = _PendingNorm(weakref.ref(grad), grad._version, norm_type, ticket, found)
        assert isinstance(param, nn.Parameter)
        self._mark_pending(param, ticket)
