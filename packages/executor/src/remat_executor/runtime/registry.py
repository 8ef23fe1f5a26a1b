"""Runtimes by name, and whether this machine has what they need."""

import torch

from remat_executor.errors import BadInput
from remat_executor.lowering.runtime_protocol import Runtime
from remat_executor.runtime.cudagraph import CudaGraphs
from remat_executor.runtime.eager import Eager
from remat_executor.runtime.inductor import Inductor
from remat_executor.torch_private.inductor import inductor_lacks
from remat_graph.errors import shown

RUNTIMES = ("eager", "inductor", "cudagraph")


def check_runtime(name: object, device: torch.device) -> None:
    """Whether a runtime of this name can serve this device.

    Raises:
        BadInput: there is none, or the machine lacks what it needs.
    """
    if not isinstance(name, str) or name not in RUNTIMES:
        raise BadInput(
            problem=f"runtime is {shown(name)}, not one of {', '.join(map(repr, RUNTIMES))}",
            advice='leave it out for "eager"',
        )
    if name == "cudagraph" and device.type != "cuda":
        raise BadInput(
            problem=f"runtime 'cudagraph' needs a CUDA device, and the model is on {device}",
            advice='use runtime="eager"',
        )
    lacking = inductor_lacks(device.type) if name == "inductor" else None
    if lacking is not None:
        raise BadInput(
            problem=f"runtime 'inductor' needs {lacking}, which is not there",
            advice='install it, or use runtime="eager"',
        )


def new_runtime(name: str) -> Runtime:
    """A runtime for one program, by a name that was checked."""
    match name:
        case "inductor":
            return Inductor()
        case "cudagraph":
            return CudaGraphs()
        case _:
            return Eager()
