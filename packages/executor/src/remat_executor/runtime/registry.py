"""Find a runtime by its name and check that this machine has what the runtime needs."""

import functools
from collections.abc import Callable, Mapping

import torch

from remat_executor.errors import BadInput, check_choice
from remat_executor.lowering.runtime_protocol import Runtime
from remat_executor.runtime.cudagraph import CudaGraphs
from remat_executor.runtime.eager import Eager
from remat_executor.runtime.graph_recorder import CaptureStream, CudaGraphRecorder
from remat_executor.runtime.inductor import Inductor
from remat_executor.torch_private.inductor import missing_for_inductor

RuntimeFactory = Callable[[], Runtime]
"""Makes the runtime of one step."""


def _cuda_graphs(device: torch.device) -> RuntimeFactory:
    stream = CaptureStream(device)  # for all steps of a module, which take its workspaces once
    return lambda: CudaGraphs(functools.partial(CudaGraphRecorder, stream))


RUNTIMES: Mapping[str, Callable[[torch.device], RuntimeFactory]] = {
    "eager": lambda device: Eager,
    "inductor": lambda device: Inductor,
    "cudagraph": _cuda_graphs,
}
"""By name, what makes the factory of a module's runtimes on a device."""


def check_runtime(runtime: str | RuntimeFactory) -> None:
    """Check the name of a runtime; what the runtime needs is checked when there is a device.

    Raises:
        BadInput: there is no runtime of this name.
    """
    if not callable(runtime):
        check_choice("runtime", runtime, RUNTIMES, "eager")


def runtime_factory(
    runtime: str | RuntimeFactory,
    device: torch.device,
    missing: Callable[[str], str | None] = missing_for_inductor,
) -> RuntimeFactory:
    """The factory of a named runtime; a factory is returned unchanged.

    Args:
        runtime: a name of `RUNTIMES`, or a factory.
        device: where the step runs.
        missing: says what Inductor lacks on a type of device; None if nothing.

    Raises:
        BadInput: there is no runtime of this name, or the machine lacks what it needs.
    """
    check_runtime(runtime)
    if callable(runtime):
        return runtime
    if runtime == "cudagraph" and device.type != "cuda":
        raise BadInput(
            problem=f"runtime 'cudagraph' needs a CUDA device, and the model is on {device}",
            advice='use runtime="eager"',
        )
    lacking = missing(device.type) if runtime == "inductor" else None
    if lacking is not None:
        raise BadInput(
            problem=f"runtime 'inductor' needs {lacking}, which this machine does not have",
            advice='install it, or use runtime="eager"',
        )
    return RUNTIMES[runtime](device)
