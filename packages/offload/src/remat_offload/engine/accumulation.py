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
from torch import nn
from torch.utils.hooks import RemovableHandle

from remat_executor.errors import warn
from remat_executor.torch_private.autograd import will_accumulate

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

    def expect(self, param: nn.Parameter) -> None:
        """Note that this part of the backward delivers the gradient of a parameter on the host."""
        node = torch.autograd.graph.get_gradient_edge(param).node
        if not will_accumulate(node):  # for example in torch.autograd.grad
            return
        added = threading.Event()
        hook = node.register_hook(lambda *_: added.set())  # runs after the hooks of the parameter
        self._delivered.append(_Delivered(added, hook))

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
