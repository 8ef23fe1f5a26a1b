"""Exact live bytes of tensor storages over one region of eager PyTorch code, on any device.

    with MemoryMeter(model, batch, device="cpu") as meter:
        model(batch).backward()
    meter.peak_nbytes, meter.peak_op, meter.live_nbytes, meter.made_nbytes, meter.flops

A dispatch mode sees the outputs of every operator, below autograd, and therefore also inside
``autograd.Function``, in the backward and in the engine's own threads. It counts *storages*: a storage once,
however many tensors view it, from the operator that makes it until its last owner, a Python name or a saved
tensor of autograd, releases it. PyTorch keeps one Python object for a storage as long as the storage lives,
so a weak reference to that object detects its end. ``resize_`` is followed: a storage is measured again
whenever an operator reads or returns it.

A storage that an operator reads and that no operator under the meter made existed at entry and costs nothing.
Name such storages as the *baseline* to follow them too: freeing one then lowers ``live_nbytes``.

Not counted: workspaces inside kernels, the allocator's rounding, buffers inside Inductor's kernels and
higher-order operators, sparse tensors, and tensors made without an operator, such as
``Generator.get_state()`` (a clone of it counts). ``remat_executor.memory.allocator`` is the second,
independent reading, which includes them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.fork_lock import ForkAwareLock
from remat_executor.torch_private.flop_rules import flop_rule


class MemoryMeter(TorchDispatchMode):
    """Counts live storage bytes on one device above what was there at entry.

    A meter may be entered again; its counts continue.

    Args:
        baseline: tensors, modules, and nested lists, tuples and mappings of them, that exist at entry. The
            ``.grad`` of a tensor and the buffers of a module belong to it.
        device: the device to meter; a type without an index means all devices of that type.
        trace: keep ``(operator, live bytes after it)`` for every operator in ``trace``.

    Attributes:
        live_nbytes: bytes live now, above the baseline; negative if more of it was freed than was made.
        peak_nbytes: the largest ``live_nbytes`` after any operator.
        peak_op: the operator that reached it, as ``aten.mm.default``; ``""`` before the first.
        made_nbytes: bytes of all storages that operators made, freed ones included, and by which storages
            grew: a measure of recomputation.
        baseline_nbytes: bytes of the baseline, each storage once.
        flops: by the formulas of ``torch.utils.flop_counter`` (matrix products, convolutions, attention).
        trace: the operators and the bytes after each, or ``None``.
    """

    supports_higher_order_operators = True

    def __init__(self, *baseline: object, device: torch.device | str = "cpu", trace: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device)
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.peak_op = ""
        self.made_nbytes = 0
        self.flops = 0
        self.trace: list[tuple[str, int]] | None = [] if trace else None
        # A weak reference may fire in any thread, also in one that holds the lock, so the lock is re-entrant.
        self._lock = ForkAwareLock("a memory meter")
        self._nbytes: dict[int, int] = {}  # by the id of the storage's Python object
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in _named_tensors(baseline):
            for storage in _storages(tensor):
                self._follow(storage)
        self.baseline_nbytes, self.live_nbytes, self.made_nbytes = self.live_nbytes, 0, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that code compiled by Dynamo runs and compiles under the meter."""
        return True

    def reset_peak(self) -> None:
        """Restart the peak from the bytes that are live now."""
        self.peak_nbytes, self.peak_op = self.live_nbytes, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a wrapper calls operators on its inner tensors, which come back here
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # inference mode skips autograd, which decomposes composite operators otherwise
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._see_inputs(args)
        self._see_inputs(kwargs.values())
        out = func(*args, **kwargs)
        self._see_outputs(out)
        with self._lock:
            live = self.live_nbytes
            if live > self.peak_nbytes:
                self.peak_nbytes, self.peak_op = live, str(func)
            if self.trace is not None:
                self.trace.append((str(func), live))
            count = flop_rule(getattr(func, "overloadpacket", None))
            if count is not None:
                self.flops += int(count(*args, **kwargs, out_val=out))
        return out

    def _see_inputs(self, values: Iterable[Any]) -> None:
        """Register unknown storages, which existed at entry, at no cost."""
        for tensor in _tensors(values):
            for storage in _storages(tensor):
                if id(storage) in self._nbytes:
                    self._resized(storage)
                elif self._here(storage):
                    self._know(storage, nbytes=storage.nbytes(), freed=self._forget)

    def _see_outputs(self, out: Any) -> None:
        for tensor in _tensors((out,)):
            for storage in _storages(tensor):
                self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._nbytes:
            self._resized(storage)
        elif self._here(storage):
            with self._lock:
                self._know(storage, nbytes=storage.nbytes(), freed=self._free)
                self.live_nbytes += self._nbytes[id(storage)]
                self.made_nbytes += self._nbytes[id(storage)]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            key, nbytes = id(storage), storage.nbytes()
            if nbytes != self._nbytes[key]:
                self.live_nbytes += nbytes - self._nbytes[key]
                self.made_nbytes += max(0, nbytes - self._nbytes[key])
                self._nbytes[key] = nbytes

    def _know(self, storage: torch.UntypedStorage, *, nbytes: int, freed: Callable[[int], None]) -> None:
        key = id(storage)
        with self._lock:
            self._nbytes[key] = nbytes
            self._references[key] = weakref.ref(storage, lambda _: freed(key))

    def _free(self, key: int) -> None:
        with self._lock:
            del self._references[key]
            self.live_nbytes -= self._nbytes.pop(key)

    def _forget(self, key: int) -> None:
        with self._lock:
            del self._references[key], self._nbytes[key]

    def _here(self, storage: torch.UntypedStorage) -> bool:
        device = storage.device
        if device.type != self.device.type or self.device.index not in (None, device.index):
            return False
        try:
            return storage.nbytes() == 0 or storage.data_ptr() != 0
        except RuntimeError:
            return False  # a tracer's storage, which holds nothing


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, also in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _named_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from _named_tensors(list(value.parameters()))
        yield from _named_tensors(list(value.buffers()))
    elif isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _named_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _named_tensors(item)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor; a wrapper subclass has those of its inner tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without storage
