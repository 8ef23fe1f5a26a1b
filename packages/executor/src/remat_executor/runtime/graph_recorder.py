"""Record work as CUDA graphs in a memory pool of one device.

Libraries of matrix products take a workspace for each thread and stream (32 MiB on Hopper) when they first
run there. Taken while a graph is recorded, the workspace would be part of that graph's pool. So all graphs of
a module are recorded on one stream, and the workspaces are taken before, by a graph in a pool of its own that
is kept: recorded graphs go on using the addresses, even after torch has dropped its workspaces.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True)
class PoolTensor:
    """Address and layout of a tensor in the pool."""

    address: int
    nbytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "PoolTensor":
        """Describe a tensor by its storage."""
        storage = tensor.untyped_storage()
        return cls(
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            offset=int(tensor.storage_offset()),
            size=tuple(tensor.size()),
            stride=tensor.stride(),
            dtype=tensor.dtype,
        )


class GraphRecorder(Protocol):
    """Records work on a device; all records share one memory pool."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that were allocated in the pool while work was recorded.

        Exact if the device's peak was reset before the first record, and too large otherwise.
        """

    def warm_up(self) -> None:
        """Let libraries take the workspaces of this thread, outside of the pool."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""

    def record(
        self, work: Callable[[], list[Tensor]], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Record work without running it.

        Args:
            work: the work; it draws from these generators in addition to the default one.
            generators: they keep their states outside of the record.

        Returns:
            The results, which are in the pool, and a function that runs the work.
        """

    def at(self, place: PoolTensor) -> Tensor:
        """A tensor on memory of the pool, without ownership."""


class _Memory:
    """Bytes of the pool, for `torch.as_tensor`."""

    def __init__(self, place: PoolTensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (place.nbytes,),
            "typestr": "|u1",
            "data": (place.address, False),
            "version": 2,
        }


class CaptureStream:
    """A stream on which graphs are recorded, and the workspaces that it needs.

    Args:
        device: the device of the graphs; it need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.workspaces = torch.cuda.graph_pool_handle()
        self.kept: list[torch.cuda.CUDAGraph] = []
        self.warm = threading.local()

    def capture(self, pool: Any, work: Callable[[], Any], generators: Sequence[torch.Generator] = ()) -> Any:
        """Return a graph of the work, recorded in a pool, and the work's results."""
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            # Other threads of the engine may work meanwhile; only this one is recorded.
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                results = work()
        return graph, results

    def warm_up(self) -> None:
        """Take the workspaces of this thread, once."""
        if getattr(self.warm, "done", False):
            return
        try:
            _multiply(self.device)  # a library cannot be initialized while work is recorded
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.warm.done = True
            return  # deterministic algorithms may refuse products, so a step that runs has none
        graph, _ = self.capture(self.workspaces, functools.partial(_multiply, self.device))
        self.kept.append(graph)
        self.warm.done = True


class CudaGraphRecorder:
    """CUDA graphs in one pool.

    Args:
        stream: where they are recorded; several pools may share it.
    """

    def __init__(self, stream: CaptureStream) -> None:
        self.stream, self.device = stream, stream.device
        self.pool = torch.cuda.graph_pool_handle()
        self.peak_nbytes = 0

    def warm_up(self) -> None:
        """Let libraries take the workspaces of this thread, outside of the pool."""
        self.stream.warm_up()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.is_cuda and self.device.index in (None, tensor.device.index)

    def record(
        self, work: Callable[[], list[Tensor]], generators: Sequence[torch.Generator]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Capture a graph."""
        outside_nbytes = torch.cuda.memory_allocated(self.device) - self._allocated_nbytes()
        graph, results = self.stream.capture(self.pool, work, generators)
        # A peak that an earlier record has set is counted with what was outside then, which was not more.
        self.peak_nbytes = max(
            self.peak_nbytes, torch.cuda.max_memory_allocated(self.device) - outside_nbytes
        )
        return results, graph.replay

    def at(self, place: PoolTensor) -> Tensor:
        """A tensor on memory of the pool."""
        whole = torch.as_tensor(_Memory(place), device=self.device).view(place.dtype)
        return whole.as_strided(place.size, place.stride, place.offset)

    def _allocated_nbytes(self) -> int:
        """Bytes that are allocated in the pool now."""
        segments = torch.cuda.memory_snapshot()
        mine = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self.pool)]
        return sum(int(segment["allocated_size"]) for segment in mine)


def _multiply(device: torch.device) -> None:
    """A product and one with a bias, for which torch may use two libraries."""
    x = torch.ones(16, 16, device=device)
    torch.addmm(x[0], x, torch.mm(x, x))
