"""Private names of the profiler, and of the thread that it leaves behind."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name


@functools.cache
def _profilers_watcher() -> tuple[Any, Any] | None:
    """What finds the profiler's object that has a thread, and what ends that; None where there are none."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(library))
            instance, stop = (
                getattr(loaded, f"_ZN9libkineto12ConfigLoader{name}Ev")
                for name in ("8instance", "10stopThread")
            )
            instance.restype, stop.restype, stop.argtypes = ctypes.c_void_p, None, [ctypes.c_void_p]
            return instance, stop
    return None


def end_profilers_thread() -> None:
    """End the thread that the profiler's first session leaves behind, to wait for a tracing daemon's word.

    A process that is forked beside it never ends: its exit waits for that thread, or aborts. With a
    daemon, which ``KINETO_USE_DAEMON`` asks for, it stays.
    """
    found = None if os.environ.get("KINETO_USE_DAEMON") else _profilers_watcher()
    if found is not None:
        instance, stop = found
        stop(instance())


def profiler_running() -> bool:
    """Whether a profiler records in this process; starting a second one silently ends the first."""
    return bool(private_name("torch.autograd.profiler", "_is_profiler_enabled"))
