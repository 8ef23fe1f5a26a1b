"""CUDA graphs are recorded on the device of the model, and the bytes of their pool are counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remat_executor.runtime import graph_recorder
from remat_executor.runtime.cudagraph import CudaGraphs
from remat_executor.runtime.graph_recorder import CaptureStream, CudaGraphRecorder
from remat_executor.runtime.registry import runtime_factory


class Cuda:
    """Stands for `torch.cuda`: notes on which device, stream and pool graphs are recorded."""

    def __init__(self) -> None:
        self.current = 0
        self.pools = 0
        self.allocated = {0: 0, 1: 100}  # by device
        self.peak = {0: 0, 1: 100}
        self.in_pool: dict[tuple[int, int], int] = {}
        self.captures: list[Any] = []

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def Stream(self, device: torch.device) -> str:  # noqa: N802
        return f"stream of {device}"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.captures.append((self.current, pool, stream))
        yield

    def _take(self, pool: tuple[int, int], nbytes: int, left: int) -> list[Tensor]:
        """Allocate in a pool, and free some of it."""
        self.peak[1] = max(self.peak[1], self.allocated[1] + nbytes)
        self.in_pool[pool] = self.in_pool.get(pool, 0) + left
        self.allocated[1] += left
        return []

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated[device.index]

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak[device.index]

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [{"segment_pool_id": pool, "allocated_size": nbytes} for pool, nbytes in self.in_pool.items()]


def test_graphs_are_recorded_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its capture stream, whatever the current device; workspaces once a thread, in a pool that stays."""
    cuda, device = Cuda(), torch.device("cuda:1")
    for name in (n for n in vars(Cuda) if not n.startswith("_")):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(graph_recorder, "_multiply", lambda device: None)
    shared = CaptureStream(device)
    first, second = CudaGraphRecorder(shared), CudaGraphRecorder(shared)
    for recorder in (first, second, first):
        recorder.warm_up()
    other = threading.Thread(target=first.warm_up)
    other.start()
    other.join()
    stream, workspaces = "stream of cuda:1", (0, 1)
    assert cuda.captures == [(1, workspaces, stream)] * 2

    first.record(lambda: cuda._take(first.pool, 70, left=30), [])
    cuda.allocated[1] += 20  # a result of the caller
    first.record(lambda: cuda._take(first.pool, 10, left=0), [])
    assert cuda.captures[2:] == [(1, first.pool, stream)] * 2
    assert (first.peak_nbytes, second.peak_nbytes) == (70, 0)
    first.record(lambda: cuda._take(first.pool, 60, left=0), [])
    assert first.peak_nbytes == 90
    assert cuda.current == 0


def test_the_steps_of_a_module_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the workspaces; another module has its own, which go with it."""
    cuda, device = Cuda(), torch.device("cuda:1")
    for name in (n for n in vars(Cuda) if not n.startswith("_")):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    factories = [runtime_factory("cudagraph", device) for _ in range(2)]
    one, two, other = (factory() for factory in (factories[0], factories[0], factories[1]))
    assert isinstance(one, CudaGraphs)
    assert isinstance(two, CudaGraphs)
    assert isinstance(other, CudaGraphs)
    recorders: list[Any] = [runtime.recorder() for runtime in (one, two, other)]
    assert recorders[0].stream is recorders[1].stream is not recorders[2].stream
    assert recorders[0].pool != recorders[1].pool
