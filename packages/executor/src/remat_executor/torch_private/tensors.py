"""Private names of tensors: storages, versions and layouts."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from remat_executor.torch_private.lookup import private_name
from remat_graph.errors import text_of


def past_torch_function() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread treats tensors of subclasses as plain tensors."""
    disabled: contextlib.AbstractContextManager[None] = private_name(
        "torch._C", "DisableTorchFunctionSubclass"
    )()
    return disabled


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; valid while a tensor on it lives."""
    return int(tensor.untyped_storage()._cdata)


def memory_id(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's memory, valid as long as its address is the same; None without memory.

    The object of a storage may go and its address be given to the next one, while a tensor without bytes
    shows no change of address.
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return None
    try:
        address = storage.data_ptr()
    except RuntimeError:  # a wrapper around other tensors
        address = 0
    return address or -storage_id(tensor)


def tensor_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor has been written in place."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # an inference tensor has no version
        return [0 if t.is_inference() else t._version for t in tensors]


def layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A fast check that tensors keep their type, dtype, device, shape, strides and requires_grad."""
    guard_class = private_name("torch._C._dynamo.guards", "TensorGuards")
    guard = guard_class(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )
    return functools.partial(guard.check, *tensors)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the allocator of the CPU or of a device ran out of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text_of(error)


def storage_holders(tensor: torch.Tensor) -> int:
    """The number of references to a tensor's storage, including Python's own object."""
    count: int = private_name("torch._C", "_storage_Use_Count")(tensor.untyped_storage()._cdata)
    return count
