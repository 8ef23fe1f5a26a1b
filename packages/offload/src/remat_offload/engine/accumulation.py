"""`Accumulation` lets the backward wait until autograd has added the gradients that it got on the host.

Autograd adds a gradient on the host in the thread that called ``backward``, and runs the backward of a CUDA
device in another one. So the next part of the backward could begin before the gradients of the previous part
are added: more of them would be alive than planned, and hooks that fire as they are added would use the
engine at the same time. On the CPU one thread does both, and there is nothing to wait for.
"""

import threading
from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remat_executor.errors import warn
from remat_executor.torch_private.autograd import has_tensor_hooks, will_accumulate
from remat_executor.torch_private.tensors import past_torch_function
from remat_offload.engine.pending_parameters import pending_work
from remat_offload.host_memory.pool import Event

LIMIT_S = 10.0
"""How long a gradient is waited for: a hook may take its time, or have failed, which nobody here sees."""


@attrs.frozen(eq=False)
class _Delivered:
    """A gradient that autograd has got, or will get at the end of this part of the backward."""

    added: threading.Event
    hook: RemovableHandle


def _wait(added: threading.Event) -> bool:
    return added.wait(LIMIT_S)


@attrs.define(eq=False)
class Accumulation:
    """The gradients of one call on the host, from their delivery until they are added.

    Attributes:
        wait_for: blocks until a gradient is added; False if it was not within a limit.
    """

    wait_for: Callable[[threading.Event], bool] = _wait
    _delivered: list[_Delivered] = attrs.field(factory=list, init=False)  # in this part
    _due: list[_Delivered] = attrs.field(factory=list, init=False)  # in earlier parts

    def expect(self, param: nn.Parameter, copy: Event) -> bool:
        """Note that this part of the backward delivers the gradient of a parameter on the host.

        Args:
            param: the parameter.
            copy: brings the gradient's bytes.

        Returns:
            Whether autograd will add it: not in ``torch.autograd.grad``, for example.
        """
        with past_torch_function():
            node = torch.autograd.graph.get_gradient_edge(param).node
        if not will_accumulate(node):
            return False
        added = threading.Event()

        def after_adding(_: object, given: tuple[Tensor, ...]) -> None:
            try:
                with past_torch_function(), torch.no_grad():
                    grad = param.grad
                    if grad is not None and not copy.query() and grad.data_ptr() != given[0].data_ptr():
                        copy.synchronize()  # autograd has copied it instead of taking it over
                        grad.copy_(given[0])
            finally:
                added.set()

        hook = node.register_hook(after_adding)  # runs after the hooks of the parameter
        self._delivered.append(_Delivered(added, hook))
        return True

    def begin_part(self) -> None:
        """Note that autograd has got the gradients of the parts so far."""
        self._due += self._delivered
        self._delivered.clear()

    def finish(self) -> None:
        """Wait until the gradients of earlier parts are added."""
        while self._due:
            gradient = self._due.pop(0)
            if not self.wait_for(gradient.added):
                self._due.clear()
                warn(
                    f"a gradient on the host was not added within {LIMIT_S:g} s, perhaps because of a slow "
                    "or failing hook of its parameter; the backward continues, and may use more host memory"
                )
            gradient.hook.remove()


def takes_over_unread(param: nn.Parameter) -> bool:
    """Whether autograd makes a gradient the ``.grad`` of a parameter without reading its bytes.

    Not if there is one to add to, if a hook gets the gradient before that, if autograd looks for NaN, or if
    the parameter awaits other work already.
    """
    work = pending_work(param)
    if (work is not None and not work.query()) or torch.is_anomaly_enabled():
        return False
    with past_torch_function():
        return param.grad is None and not has_tensor_hooks(param)
