"""Explain a failed capture in one line: what was met, where, and what to do."""

import traceback
from pathlib import Path

import torch
from torch import nn

from remat_executor.errors import CaptureError
from remat_executor.torch_private.capture import has_dynamic_shape, is_data_dependent
from remat_graph.errors import text_of

_OWN, _TORCH = str(Path(__file__).parents[1]), torch.__path__[0]  # frames of neither are the user's


def explained(error: Exception, module: nn.Module, *, runs: bool) -> CaptureError:
    """Turn an error of a trace into a `CaptureError`; `runs` if the original is known to accept the call."""
    place = where(error, module)
    kind = type(module).__name__
    if is_data_dependent(error):
        if _is_averaging_norm(error):
            return CaptureError(
                problem=f"the factor of momentum=None is computed from a tensor's value{place}",
                advice="give it a momentum, such as 0.1, or call it in eval mode",
            )
        what = "a shape" if has_dynamic_shape(error) else "a branch or a Python number"
        return CaptureError(
            problem=f"{what} depends on the values of a tensor{place}",
            advice="plan the submodules on either side of it instead of the whole model, as by "
            "limit_memory(model.part, budget)",
        )
    first_line = (text_of(error).splitlines() or [""])[0][:300]
    if "_GuardedGenerator" in first_line or "torch._C.Generator" in first_line:
        return foreign_generator(place)
    if "Unexpected fake buffer" in first_line:
        return CaptureError(
            problem=f"the forward keeps a tensor, in its module or a cache, for its next call{place}",
            advice="register it as a buffer before and write it in place; clear the cache, which now holds a "
            "tensor of the trace",
        )
    if ".numpy() is not supported for tensor subclasses" in first_line:
        return CaptureError(
            problem=f"the forward makes a NumPy array of a tensor{place}",
            advice="compute with torch instead, or plan the submodules on either side of it, as by "
            "limit_memory(model.part, budget)",
        )
    if "convert all Tensors to FakeTensors" in first_line:
        return CaptureError(
            problem=f"the forward reads a tensor that is neither in its module nor an argument{place}",
            advice="register it with register_buffer, or its module in an nn.ModuleList; hold it in an "
            "attribute, a list or a dict; or pass it as an argument",
        )
    problem = f"{type(error).__name__}: {first_line}{place}"
    if not runs:
        return CaptureError(
            problem=problem,
            advice=f"if {kind} alone raises this too, give inputs that it accepts; else wrap a submodule",
        )
    line = "a submodule of it that does not contain this line" if place else "its submodules one by one"
    return CaptureError(problem=f"{problem}, though {kind} alone accepts this call", advice=f"wrap {line}")


def foreign_generator(place: str = "") -> CaptureError:
    """The error for ``torch.rand(..., generator=...)``."""
    return CaptureError(
        problem=f"the forward draws from a generator of its own, which is not handled yet{place}",
        advice="leave generator= out to draw from the default one, or pass the drawn numbers as an input",
    )


def where(error: BaseException, module: nn.Module) -> str:
    """Where a forward raised: the innermost submodule and the user's line, as text to append."""
    names = {id(submodule): name for name, submodule in module.named_modules()}
    met = [m for m in _modules(error) if names.get(id(m))]
    found = [f" in {names[id(met[-1])]!r} ({type(met[-1]).__name__})"] if met else []
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith((_TORCH, _OWN))]
    found += [f" at {f.filename}:{f.lineno} ({f.line})" for f in lines[-1:]]
    return ",".join(found)


def _modules(error: BaseException) -> list[nn.Module]:
    """The modules whose methods were running, the innermost last."""
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return [thing for thing in called if isinstance(thing, nn.Module)]


def _is_averaging_norm(error: BaseException) -> bool:
    """Whether the error comes from a batch norm with ``momentum=None``."""
    modules = _modules(error)
    kind = nn.modules.batchnorm._BatchNorm
    return bool(modules) and isinstance(modules[-1], kind) and modules[-1].momentum is None
