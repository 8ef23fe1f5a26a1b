"""`ChunkedStep` steps one parameter chunk by chunk and leaves the state of one step of the whole.

States of the parameter's shape are stepped chunk by chunk, in their place. For all other states, above all
the step count, every chunk starts from the value before the step, and the value after the last chunk is kept.
So the count advances once.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from remat_offload.errors import StepMisuse
from remat_offload.optimizer.private_copy import State, step_tensor
from remat_offload.tensor_memory import flat_view, memory_order, share_order

_BITS = {1: torch.uint8, 2: torch.int16}
_IN_CACHE = 1 << 18  # elements: a copy of that size stays in a cache
_AT_LEAST = 64  # elements that are worth a call


class ChunkedStep:
    """A step in progress. ``finish`` writes its state to the user's optimizer, which is unchanged before.

    Args:
        optimizer: the user's optimizer.
        param: the user's parameter, which the state belongs to.
        settings: the current settings of its group.
        names: the states of the parameter's shape.
        reserve: allocates a state that does not exist yet, by its name.
        numel: elements of the parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        param: torch.Tensor,
        settings: Mapping[str, Any],
        names: tuple[str, ...],
        reserve: Callable[[str], torch.Tensor],
        numel: int,
    ) -> None:
        self.names = names
        self._optimizer, self._param, self._settings = optimizer, param, settings
        self._reserve = reserve
        self._numel = self._left = numel
        self._before: State | None = optimizer.state.get(param)
        self._places: dict[str, torch.Tensor] = {}
        self._after: State | None = None
        self._grad_buffer: torch.Tensor | None = None

    def has(self, name: str) -> bool:
        """Whether a state exists from earlier steps; otherwise the content of its place is not read."""
        return self._before is not None and name in self._before

    def place(self, name: str) -> torch.Tensor:
        """Return the whole of a state of the parameter's shape, in its place."""
        if name not in self._places:
            old = (self._before or {}).get(name)
            self._places[name] = self._reserve(name) if old is None else old
        return self._places[name]

    def step(
        self,
        data: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        *,
        master: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Step one chunk, or the whole, on tensors of one shape and device.

        Args:
            data: the chunk of the parameter, changed in place.
            grad: its gradient.
            states: for each of `names`, its chunk; read if the step ``has`` it, and written.
            master: the chunk in a wider dtype: it is stepped, and `data` is rounded from it. Elements of
                `data` that differ from the rounded master were written by the user, and replace it.
            scale: a scalar tensor; `grad` is multiplied by it first, in place.

        Raises:
            StepMisuse: a state is missing, or differs from the optimizer's profile.
        """
        if missing := [name for name in self.names if name not in states]:
            raise StepMisuse(problem=f"no place for {', '.join(missing)}; give one for each of names")
        if scale is not None:
            grad.mul_(scale.to(grad.device))
        if master is not None:
            _refresh_master(master, data)
        before = None
        if self._before is not None:
            # Fused and capturable kernels read the step count on their device; others keep it on the CPU.
            device = data.device if self._settings.get("fused") or self._settings.get("capturable") else None
            before = {
                n: states[n] if n in states else _fresh(value, device) for n, value in self._before.items()
            }
        target, gradient = (data, grad) if master is None else (master, self._widened(grad, master))
        self._after = step_tensor(self._optimizer, self._settings, target, gradient, copy.copy(before))
        store_state(self._after or {}, states, before or {})
        if data.numel() < self._numel:
            self._check_carried(data.shape)
        if master is not None:
            data.copy_(master)
        self._left -= data.numel()

    def finish(self) -> None:
        """Write the state to the user's optimizer.

        Raises:
            StepMisuse: not every element was stepped once.
        """
        if self._left:
            raise StepMisuse(problem=f"{self._left:,} elements are left to step; step every chunk once")
        if self._after is None:
            return
        kept = {n: self.place(n) if n in self.names else value for n, value in self._after.items()}
        for name, old in (self._before or {}).items():
            if name not in self.names and _alike(old, kept.get(name)):
                kept[name] = old.copy_(kept[name])  # the same tensor: a captured graph may use its address
        self._optimizer.state[self._param] = kept  # one assignment, so that threads may finish concurrently

    def _check_carried(self, chunk: torch.Size) -> None:
        for name, value in (self._after or {}).items():
            shaped = isinstance(value, torch.Tensor) and value.shape == chunk and value.numel() > 1
            if shaped and name not in self.names:
                raise StepMisuse(
                    problem=f"the state {name} is not in the optimizer's profile; make a new Stepper"
                )

    def _widened(self, grad: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        if memory_order(master) is None:
            return grad.to(master.dtype)
        if self._grad_buffer is None or self._grad_buffer.numel() < grad.numel():
            self._grad_buffer = torch.empty(grad.numel(), dtype=master.dtype, device=master.device)
        return self._grad_buffer[: grad.numel()].as_strided(master.shape, master.stride()).copy_(grad)


def _refresh_master(master: torch.Tensor, data: torch.Tensor) -> None:
    """Update a master from its parameter where the user has written to the parameter.

    Writes are found by comparing bits: ``.data`` and assigned memory do not change a version counter.
    Temporary memory is smaller than that of the widened gradient of the next step. Only on a CPU a comparison
    precedes the writes: on a device it would block the caller, who pays for each kernel there.
    """
    if not share_order(master, data):
        _refresh_chunk(master, data)
        return
    wide, narrow = flat_view(master), flat_view(data)
    if data.device.type != "cpu":  # halves, whose temporary memory is smaller than the widened gradient
        half = -(-data.numel() // 2) or 1
        for chunk in zip(wide.split(half), narrow.split(half), strict=True):
            _refresh_chunk(*chunk)
        return
    size = _IN_CACHE * torch.get_num_threads()
    for ours, theirs in zip(wide.split(size), narrow.split(size), strict=True):
        if not _same_bits(ours.to(data.dtype), theirs):
            for chunk in zip(ours.split(_AT_LEAST), theirs.split(_AT_LEAST), strict=True):
                _refresh_chunk(*chunk)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether flat tensors of one dtype on a CPU have the same bits."""
    words = all(t.storage_offset() * t.itemsize % 8 == t.numel() * t.itemsize % 8 == 0 for t in (one, other))
    kind = torch.int64 if words else _BITS[one.itemsize]
    if torch.get_num_threads() == 1:  # numpy uses one thread; so does `torch.equal`, which is slower
        return np.array_equal(one.view(kind).numpy(), other.view(kind).numpy())
    return not bool((one.view(kind) != other.view(kind)).any())


def _refresh_chunk(master: torch.Tensor, data: torch.Tensor) -> None:
    kind = _BITS[data.itemsize]
    changed = master.to(data.dtype).view(kind) != data.view(kind)
    torch.where(changed, data, master, out=master)


def store_state(after: State, states: Mapping[str, torch.Tensor], before: State) -> None:
    """Copy tensors that a step has created to their places, `states`; raise `StepMisuse` if they differ."""
    made = {name: after[name] for name in states if name in after and after[name] is not states[name]}
    for name, value in made.items():
        kind = (states[name].shape, states[name].dtype)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != kind:
            raise StepMisuse(
                problem=f"the state {name} differs from the optimizer's profile; make a new Stepper"
            )
        if any(value is old for old in before.values()):  # two states that were swapped
            made[name] = value.clone()
    for name, value in made.items():
        states[name].copy_(value)


def _fresh(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.to(device or value.device, copy=True)


def _alike(old: Any, new: Any) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    )
