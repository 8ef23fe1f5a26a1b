"""Private names of Dynamo: functions that `torch.compile` does not trace, and calls of those that it does."""

import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from remat_executor.torch_private.lookup import private_name
from remat_graph.contexts import context


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, hidden from an enclosing `torch.compile`."""
    unseen: Callable[..., Any] = private_name("torch._dynamo", "disable")(function)
    return unseen


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """What `torch.compile` made this module of; None if it did not."""
    if "torch._dynamo" not in sys.modules:
        return None
    kind = private_name("torch._dynamo.eval_frame", "OptimizedModule")
    original: torch.nn.Module | None = module._orig_mod if isinstance(module, kind) else None
    return original


def under_dynamo() -> bool:
    """Whether the caller runs inside a region that `torch.compile` compiles."""
    compiled = private_name("torch._dynamo.eval_frame", "__file__")
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == compiled:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@context
def before_compiled_calls(call: Callable[[], object]) -> Generator[None, None, None]:
    """A context in which `call` is called before each call of a compiled function."""
    name = "_callback_from_stance"
    chosen = private_name("torch._dynamo.eval_frame", name)
    module = sys.modules["torch._dynamo.eval_frame"]

    def choose(callback: Any) -> Any:
        callback = chosen(callback)
        if callback is not None:  # None: Dynamo is disabled for a function
            call()
        return callback

    try:
        setattr(module, name, choose)
        yield
    finally:
        setattr(module, name, chosen)
