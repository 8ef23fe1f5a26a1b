"""Count the pending planned calls that a tensor depends on: more than one at a time need a budget each."""

from collections.abc import Iterable

from torch import Tensor

from remat_executor.autograd.gradient_delivery import PlannedCall


def planned_calls_behind(tensors: Iterable[Tensor]) -> int:
    """How many calls of planned modules are in the autograd history of these tensors."""
    pending = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen, calls = set(pending), set()
    while pending:
        node = pending.pop()
        call = getattr(node, "call", None)
        if isinstance(call, PlannedCall):
            calls.add(id(call))
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return len(calls)
