"""Capture a module and a sample as one joint fx graph of forward and backward.

The module is traced as a function of flat tensors: its distinct parameters and buffers, the distinct tensors
of the sample, and those in the module's plain attributes. Everything else in the sample is a constant, which
the guards compare at each call.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.capture.absent_device import kernels_of_cuda
from remat_executor.capture.captured import Captured
from remat_executor.capture.explain import explained, where
from remat_executor.capture.random_draws import with_torch_randomness_only
from remat_executor.capture.read_joint import read_joint
from remat_executor.capture.recurrent import CHOSEN, SHAPES
from remat_executor.capture.traced_step import IsStandard, TracedStep, always_standard
from remat_executor.capture.user_errors import run_original
from remat_executor.errors import CaptureError, add_note, warn
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.capture import Joint, export_joint
from remat_executor.torch_private.dispatch import registered_on_meta, with_cuda_kernels
from remat_graph.contexts import context


def capture(
    module: nn.Module,
    tensors: Tensors,
    *,
    differentiate: Iterable[int] | None = None,
    call: Callable[..., Any] | None = None,
    is_standard: IsStandard = always_standard,
    absent: torch.device | None = None,
) -> Captured:
    """Trace one training step; the module, its buffers and all random generators stay unchanged.

    Args:
        module: the user's module, in the mode to capture.
        tensors: the module's and the sample's.
        differentiate: indices among the output tensors that get gradients; None: see `default_choice`.
        call: the function to trace instead of the module's forward.
        is_standard: whether an output, given with its structure, is of the kind that the module returns.
        absent: a CUDA device that this machine lacks, for which the meta device of the tensors stands.

    Raises:
        CaptureError: the step is not one graph, with the line where it stops and what to do.
        Exception: the error that the original raises for this call, with a note.
    """
    call = call or module.forward
    step = TracedStep(module, tensors, differentiate, call, is_standard, absent)
    step.train(module.training)
    inputs = trace_inputs(tensors)
    stopped: Exception | None = None
    try:
        with kernels_of(tensors.device.type, absent):
            joint = with_torch_randomness_only(lambda: _as_eager_branches(step, inputs), tensors)
    except CaptureError as refused:
        place = where(refused, module)
        if not place:
            raise
        raise attrs.evolve(refused, problem=refused.problem + place) from refused
    except Exception as error:  # noqa: BLE001 - user code may raise anything on fake tensors
        stopped = error
    if stopped is not None:  # outside of the handler, so that it is not the context of the user's error
        try:
            runs = raise_as_original(module, tensors, call)
            raise explained(stopped, module, runs=runs) from stopped
        finally:
            del stopped
    result = step.result
    assert result is not None  # the traced function has run
    changes = result.changes
    if changes.state:
        names = ", ".join(changes.state[:3])
        raise CaptureError(
            problem=f"the forward changes {names}, which a captured graph would not repeat",
            advice="do it outside of the forward, or in place in a buffer: buffer.add_(1); if only the first "
            "call does it, call the model once before",
        )
    captured = read_joint(joint, result, tensors, absent)
    if changes.kept:
        kept = ", ".join(changes.kept[:3])
        warn(f"the forward sets {kept}: a planned module does not do that; return it as an output instead")
    return captured


def trace_inputs(tensors: Tensors) -> tuple[Tensor, ...]:
    """The inputs of a trace; torch looks for the .grad of each, so results of other graphs become leaves."""
    return tuple(t if t.is_leaf else t.detach().requires_grad_(t.requires_grad) for t in tensors.inputs)


@context
def kernels_of(device_type: str, absent: torch.device | None) -> Generator[None, None, None]:
    """Trace what eager runs on a device, where torch's trace runs something else or nothing."""
    with (
        nullcontext() if absent is None else kernels_of_cuda(),
        registered_on_meta(SHAPES) if device_type == "cuda" else nullcontext(),
        with_cuda_kernels(CHOSEN) if device_type == "cuda" else nullcontext(),
    ):
        yield


def _as_eager_branches(step: TracedStep, inputs: tuple[Tensor, ...]) -> Joint:
    """Trace the branches that eager takes, or those for compilers if eager's cannot be traced.

    The two may differ: for a compiler, Hugging Face's models make a causal mask a tensor, and attention then
    runs another kernel than in eager, which is slower and rounds differently.
    """
    try:
        return export_joint(step, inputs)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001, S110 - data decides a branch, or fake tensors lack a rule: see below
        pass
    return export_joint(step, inputs, as_if_compiling=True)


def raise_as_original(module: nn.Module, tensors: Tensors, call: Callable[..., Any]) -> bool:
    """Raise the error that the original raises for this call, with a note that names its place.

    Returns:
        Whether the original is known to raise nothing.
    """

    def forward(copies: Tensors) -> object:
        return TracedStep(module, copies, None, call).train(module.training)(*copies.inputs)

    outcome = run_original(forward, tensors)
    if outcome.error is None:
        return outcome.runs
    add_note(
        outcome.error,
        f"raised{where(outcome.error, module)} while this call{_shapes(tensors)} was planned; the original "
        "raises the same when it is called alone: correct the model, or give inputs that it accepts",
    )
    try:
        raise outcome.error
    finally:
        del outcome  # a reference cycle through its traceback would hold the user's tensors


def _shapes(tensors: Tensors, most: int = 3) -> str:
    """The shapes of the inputs of a call, as text to append; empty if there are none."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors.arguments]
    if not shapes:
        return ""
    more = f" and {len(shapes) - most} more" if len(shapes) > most else ""
    return f" with inputs of shape {', '.join(shapes[:most])}{more}"
