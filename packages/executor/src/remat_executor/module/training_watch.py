"""Notice that a module trains although its planned forward is not called.

A limit bounds what a module's forward and its backward allocate. If training calls the module's parts, or
other methods that call them, it bounds nothing. An optimizer that steps the module's parameters shows this:
no call that needs gradients came before its first step, or between two of its steps of which the second has
new gradients. (A gradient that is set to zero, and not to None, stays the same tensor and shows nothing.)
Optimizers that do not derive from torch's are not seen, but before the first call the gradients are: no
parameter gets its gradient twice. (Once it may, by a penalty on the weights that is
differentiated before the first call.)
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


@attrs.frozen(eq=False)
class _Step:
    """A step of an optimizer: the calls before it, and by parameter the gradients, not kept alive."""

    calls: int
    gradients: dict[int, "weakref.ref[Tensor]"]


class TrainingWatch:
    """Reports once that a step trained a module's parameters without a call of it that needs gradients.

    Args:
        module: what is trained; it is not kept alive.
        report: called with the names of the children that have gradients.
    """

    # One hook for all watches, and never removed: torch iterates over its hooks while they run.
    HOOKS: ClassVar[list[Any]] = []
    # Replaced and not changed, since a thread may iterate over it.
    ACTIVE: ClassVar[tuple["weakref.ref[TrainingWatch]", ...]] = ()

    def __init__(self, module: nn.Module, report: Callable[[list[str]], None]) -> None:
        self._module = weakref.ref(module)
        self._report = report
        self._over = False
        self._calls = 0
        # Of each optimizer, the calls before its last step and the gradients that it applied, by parameter.
        self._last: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Step] = weakref.WeakKeyDictionary()
        # Those of an earlier call, which the next step applies.
        self._has_earlier_gradients = any(p.grad is not None for p in module.parameters())
        self._arrived: set[int] = set()  # identities of parameters
        heard = functools.partial(_hear, weakref.ref(self))
        self._handles = [
            p.register_post_accumulate_grad_hook(heard) for p in module.parameters() if p.requires_grad
        ]
        if not self.HOOKS:
            self.HOOKS.append(register_optimizer_step_post_hook(_look))
        TrainingWatch.ACTIVE = (*_alive(), weakref.ref(self))

    def called(self) -> None:
        """Count a call of the module that needs gradients. A capture needs them, too."""
        if torch.is_grad_enabled():
            self._calls += 1
            self._unhook()

    def stop(self) -> None:
        """Watch no longer."""
        self._unhook()
        self._end()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _end(self) -> None:
        """Report nothing any more. Hooks on parameters stay, since one of them may be what runs now."""
        self._over = True
        TrainingWatch.ACTIVE = tuple(each for each in _alive() if each() is not self)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Report if an optimizer has stepped parameters of the module by their gradients."""
        module = self._module()
        applied = {id(p): p.grad for group in optimizer.param_groups for p in group["params"]}
        stepped = {key for key, gradient in applied.items() if gradient is not None}
        if module is None or not _has_any(module, stepped):
            return
        if self._calls:
            last = self._last.get(optimizer)
            if last is None or last.calls != self._calls:
                own = {id(p) for p in module.parameters()} & stepped
                gradients = {key: weakref.ref(applied[key]) for key in own}
                self._last[optimizer] = _Step(calls=self._calls, gradients=gradients)
                return
            # The same gradients, if torch calls its hook twice for a step; a part of them, if another module
            # with some of these parameters trains.
            if any(applied.get(key) is None or applied[key] is old() for key, old in last.gradients.items()):
                return
        elif self._has_earlier_gradients:
            self._has_earlier_gradients = False
            return
        self._end()
        self._report(_names(module, stepped))

    def arrived(self, parameter: nn.Parameter) -> None:
        """Report if a parameter gets a gradient once more."""
        module = self._module()
        if self._over or self._calls or module is None:
            return
        if id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            return
        self._end()
        self._report(_names(module, self._arrived))


def _alive() -> tuple["weakref.ref[TrainingWatch]", ...]:
    return tuple(each for each in TrainingWatch.ACTIVE if each() is not None)


def _names(module: nn.Module, parameters: set[int]) -> list[str]:
    return [name for name, child in module.named_children() if _has_any(child, parameters)]


def _has_any(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(p) in parameters for p in module.parameters())


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for each in TrainingWatch.ACTIVE:
        watch = each()
        if watch is not None:
            watch.look(optimizer)


def _hear(reference: "weakref.ref[TrainingWatch]", parameter: nn.Parameter) -> None:
    watch = reference()
    if watch is not None:
        watch.arrived(parameter)
