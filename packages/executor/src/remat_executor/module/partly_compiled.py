"""Run some pieces of a compiled step as they were lowered, so that the step keeps to its budget.

A compiler writes to new memory where a plan writes over an input that it frees, and holds both for a moment.
Where no plan leaves enough headroom for that, the pieces that need it run uncompiled, in the plan's memory.
"""

from collections.abc import Callable

import attrs

from remat_executor.lowering.runtime_protocol import ChunkedRuntime
from remat_executor.module.planned_step import PlannedStep

_MOST_PIECES = 64  # that are tried, the largest first; each is measured in a few steps


def partly_compiled(
    step: PlannedStep, budget_nbytes: int, measure: Callable[[PlannedStep], tuple[PlannedStep, int]]
) -> PlannedStep | None:
    """The step with as many pieces compiled as fit, and a note of it; None if it fits with none.

    The largest pieces are tried first, since they gain most.

    Args:
        step: a step that exceeds the budget.
        budget_nbytes: what it may need.
        measure: runs a step; returns it with what was measured noted, and its peak.
    """
    if not isinstance(step.runtime, ChunkedRuntime):
        return None
    pieces = sorted(step.runtime.compiled_pieces, key=lambda piece: -piece.size)
    for piece in pieces:
        piece.runs_compiled = False
    found, peak_nbytes = measure(step)
    if peak_nbytes > budget_nbytes:
        return None
    for piece in pieces[:_MOST_PIECES]:
        piece.runs_compiled = True
        other, peak_nbytes = measure(step)
        if peak_nbytes <= budget_nbytes:
            found = other
        else:
            piece.runs_compiled = False
    count = sum(not piece.runs_compiled for piece in pieces)
    note = f"{count} of {len(pieces)} parts run uncompiled, since compiled they do not fit the budget"
    return attrs.evolve(found, plan=attrs.evolve(found.plan, notes=(*found.plan.notes, note)))
