"""Private names of tensors: storages, versions and layouts."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from remat_executor.torch_private.lookup import private_name
from remat_graph.errors import text_of


def past_torch_function() -> contextlib.AbstractContextManager[None]:
    """Within it tensors of a subclass are taken as plain ones, in this thread."""
    disabled: contextlib.AbstractContextManager[None] = private_name(
        "torch._C", "DisableTorchFunctionSubclass"
    )()
    return disabled


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share while they share a storage; valid while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor has been written in place."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # one is an inference tensor, which keeps no count
        return [0 if t.is_inference() else t._version for t in tensors]


def layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A quick check that tensors have the type, dtype, device, shape, strides and requires_grad of now."""
    guard_class = private_name("torch._C._dynamo.guards", "TensorGuards")
    guard = guard_class(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    )
    return functools.partial(guard.check, *tensors)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator, of the CPU or of a device, had nothing left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text_of(error)


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and Python's own object, hold a tensor's storage."""
    count: int = private_name("torch._C", "_storage_Use_Count")(tensor.untyped_storage()._cdata)
    return count
