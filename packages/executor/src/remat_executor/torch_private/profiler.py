"""Private names of the profiler, and of the thread that it leaves running."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name


@functools.cache
def _thread_functions() -> tuple[Any, Any] | None:
    """The C functions that find the profiler's thread owner and stop its thread; None if there are none."""
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
    """End the thread that the profiler's first session leaves running, to wait for a tracing daemon.

    The exit of a process forked while it runs would wait for that thread forever, or abort. With a daemon
    (``KINETO_USE_DAEMON``) the thread stays.
    """
    found = None if os.environ.get("KINETO_USE_DAEMON") else _thread_functions()
    if found is not None:
        instance, stop = found
        stop(instance())


def end_session(session: Any) -> None:
    """End a profiler's session if it still runs.

    Ctrl-C between the last line of a `with` block and its exit leaves the session running, and so does one
    within torch's own enter and exit.
    """
    if private_name("torch.autograd", "_profiler_enabled")():
        session.__exit__(None, None, None)
    elif profiler_running():  # torch notes the session in Python just before it begins
        private_name("torch.autograd.profiler", "_run_on_profiler_stop")()


def profiler_running() -> bool:
    """Whether a profiler runs in this process; starting a second one silently ends the first."""
    return bool(private_name("torch.autograd.profiler", "_is_profiler_enabled"))
