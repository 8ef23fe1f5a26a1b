"""Give `torch._C` the names of a CUDA build, so that ``torch.cuda`` runs unchanged on the test device."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.device.build import NAME, torch_folder


def load(path: Path) -> ModuleType:
    """Import torch with the library of the test device; returns the library.

    Its hooks are looked up while torch is imported, and ``torch.cuda`` reads `torch._C` at its import.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the test device must be loaded before it")
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    finder = _BeforeTorchCuda(path)
    sys.meta_path.insert(0, finder)
    try:
        import torch
    finally:
        sys.meta_path.remove(finder)
    torch._C._has_cuda = torch._C._has_cudnn = True
    _complete_cudnn(torch)
    torch.UntypedStorage.clone = _storage_clone(torch.UntypedStorage.clone)
    return finder.library()


class _BeforeTorchCuda(importlib.abc.MetaPathFinder):
    """Completes `torch._C` right before ``torch.cuda`` is imported."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def library(self) -> ModuleType:
        if NAME not in sys.modules:
            spec = importlib.util.spec_from_file_location(NAME, self.path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[NAME] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[NAME])
        return sys.modules[NAME]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torch.cuda":
            _complete(sys.modules["torch._C"], self.library())
        return None  # torch's own module


def _complete(core: Any, library: Any) -> None:
    """Set the names of a CUDA build in `torch._C`."""
    names = {
        **_devices(core, library),
        **_memory(library),
        **_streams(core, library),
        **_graphs(library),
    }
    for name, value in names.items():
        setattr(core, name, value)


def _complete_cudnn(torch: Any) -> None:
    """What `torch.backends.cudnn` says of recurrent layers in a build with cuDNN."""
    torch.backends.cudnn.is_acceptable = torch.cudnn_is_acceptable
    modes = SimpleNamespace(rnn_relu=0, rnn_tanh=1, lstm=2, gru=3)
    importlib.import_module("torch.backends.cudnn.rnn")
    sys.modules["torch.backends.cudnn.rnn"].m._cudnn = SimpleNamespace(RNNMode=modes)


class _Properties:
    """What a Hopper GPU says of itself, with less memory."""

    name = "remat test device"
    major, minor = 9, 0
    multi_processor_count = 132
    gcnArchName = ""  # noqa: N815
    is_integrated = False

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory


class _Runtime:
    """The functions of the CUDA runtime that torch exposes."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, library: Any) -> None:
        self._library = library

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return int(self._library.pin(address, nbytes))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return int(self._library.unpin(address))

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        free_nbytes, total_nbytes = self._library.memory_info(device)
        return free_nbytes, total_nbytes

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


def _devices(core: Any, library: Any) -> dict[str, Any]:
    def start() -> None:
        cuda: Any = sys.modules["torch.cuda"]
        cuda.default_generators = tuple(map(library.generator, range(library.device_count())))
        properties = _Properties(library.device_nbytes())
        cuda._get_device_properties = lambda device: properties

    return {
        "_CudaDeviceProperties": _Properties,
        "_cudart": _Runtime(library),
        "_cuda_init": start,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": library.device_count,
        "_cuda_getDevice": library.device,
        "_cuda_setDevice": lambda index: (library.exchange_device(index), None)[1],
        "_cuda_exchangeDevice": library.exchange_device,
        "_cuda_maybeExchangeDevice": library.maybe_exchange_device,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_synchronize": library.synchronize,
        "_cuda_sleep": library.sleep,
        "_cuda_clearCublasWorkspaces": library.clear_workspaces,
    }


def _memory(library: Any) -> dict[str, Any]:
    def set_fraction(fraction: float, device: int) -> None:
        library.set_memory_limit(int(fraction * library.device_nbytes()), device)

    return {
        "_cuda_emptyCache": library.empty_cache,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": library.memory_stats,
        "_cuda_resetPeakMemoryStats": library.reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": library.reset_accumulated,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: library.memory_limit(device) / library.device_nbytes(),
        "_cuda_memorySnapshot": lambda pool=None, *rest: {"segments": _of_pool(library.segments(), pool)},
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_CUDAAllocator_AllocatorState": object,  # a compiler imports the name
    }


def _of_pool(segments: list[dict[str, Any]], pool: Any) -> list[dict[str, Any]]:
    if pool is None or tuple(pool[:2]) == (0, 0):
        return segments
    return [segment for segment in segments if segment["segment_pool_id"] == tuple(pool[:2])]


def _streams(core: Any, library: Any) -> dict[str, Any]:
    class StreamBase(core.Stream):
        def __new__(cls, priority: int = 0, **identity: int) -> Any:
            identity.pop("stream_ptr", None)
            if identity:
                return super().__new__(cls, **identity)
            return super().__new__(cls, device=f"cuda:{library.device()}")

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

    class EventBase(core.Event):
        def __new__(cls, enable_timing: bool = False, **flags: bool) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def elapsed_time(self, end_event: Any) -> float:  # torch.Event's takes no instance of a subclass
            return float(library.elapsed_ms(self.event_id, end_event.event_id))

    return {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_getCurrentStream": library.stream,
        "_cuda_getDefaultStream": library.default_stream,
        "_cuda_getCurrentRawStream": lambda device: library.stream(device)[0],
        "_cuda_setStream": lambda stream_id, device_index, device_type: library.set_stream(
            stream_id, device_index
        ),
    }


def _graphs(library: Any) -> dict[str, Any]:
    class GraphBase:
        def __new__(cls, keep_graph: bool = False) -> Any:
            return super().__new__(cls)

        def __init__(self, keep_graph: bool = False) -> None:
            self._graph = library.Graph()

        def register_generator_state(self, generator: Any) -> None:
            self._graph.register_generator_state(generator)

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **others: Any) -> None:
            self._graph.capture_begin(tuple(pool) if pool is not None else (0, 0), capture_error_mode)

        def capture_end(self) -> None:
            self._graph.capture_end()

        def instantiate(self) -> None:
            """Do nothing: a recorded graph can run."""

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._graph.reset()

        def pool(self) -> tuple[int, int]:
            return tuple(self._graph.pool())

    return {
        "_CUDAGraph": GraphBase,
        "_graph_pool_handle": library.pool_handle,
        "_cuda_isCurrentStreamCapturing": library.is_capturing,
    }


def _storage_clone(original: Any) -> Any:
    """A CPU build cannot make a storage on another device."""

    def clone(self: Any) -> Any:
        if self.device.type != "cuda":
            return original(self)
        import torch

        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device)
        made.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self))
        return made.untyped_storage()

    return clone
