"""Name the operator that could not be measured."""

from collections.abc import Generator
from typing import ClassVar

import attrs

from remat_executor.memory.allocator import ProfilerBusy
from remat_executor.torch_private.tensors import is_out_of_memory
from remat_graph.contexts import context
from remat_graph.errors import ProblemError, text_of

_REPORT = "if the model alone takes these inputs, plan the parts around this operator and report it"
_MORE_MEMORY = (
    "this operator alone, with its inputs and outputs, must fit in what is free: free memory, also that of "
    "other processes, or take a smaller batch"
)


@attrs.frozen(kw_only=True, str=False)
class MeasureError(ProblemError):
    """An operator could not be measured.

    Attributes:
        key: the operator with its arguments.
        out_of_memory: whether it did not fit in what was free.
    """

    prefix: ClassVar[str] = "cannot measure {0.key}: "
    key: str
    out_of_memory: bool = False


@context
def failures_named(key: str) -> Generator[None, None, None]:
    """Whatever an operator raises becomes a `MeasureError` with its key."""
    try:
        yield
    except ProfilerBusy:
        raise
    except Exception as error:  # whatever the operator raises, the message names its key
        problem = text_of(error).strip().partition("\n")[0]
        full = is_out_of_memory(error)
        raise MeasureError(
            key=key,
            problem=f"{type(error).__name__}: {problem}",
            advice=_MORE_MEMORY if full else _REPORT,
            out_of_memory=full,
        ) from error
