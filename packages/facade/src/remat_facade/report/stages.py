"""A schedule in the stage form: which op runs in which stage, and what is live when each stage begins.

These are the matrices R and S of Jain et al. 2020, "Checkmate", read off a finished schedule: the step is cut
into as many stages as it has ops, and each stage ends with the first run of the next op. What runs again
stands left of the diagonal. Plain arrays, O(ops x values) of them; `matrix` draws them.
"""

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from remat_graph import Compute, Free, Graph, Lane, Placement, Schedule, Start, simulate


@attrs.frozen(kw_only=True, eq=False)
class Stages:
    """A schedule, stage by stage.

    Attributes:
        ops: the op that ends each stage and names a column of `runs`: first runs in their order, which is the
            trace's in most plans.
        values: the value of each column of `live`: all that the device ever holds, in the order in which it
            comes.
        runs: R, ints of shape (stages, ops): how often each op runs in each stage.
        live: S, booleans of shape (stages, values): what is there when each stage begins. A gradient stays
            after its delivery, as it does where ``.grad`` was None.
        boundary: how many stages belong to the forward,
        forward_values: and how many values come before the backward.
    """

    ops: tuple[int, ...]
    values: tuple[int, ...]
    runs: npt.NDArray[np.uint16]
    live: npt.NDArray[np.bool_]
    boundary: int
    forward_values: int

    @property
    def repeats(self) -> npt.NDArray[np.uint16]:
        """R without the first runs, which are its diagonal."""
        return self.runs - np.eye(len(self.ops), dtype=np.uint16)


def stages(graph: Graph, schedule: Schedule) -> Stages:
    """Cut a schedule into stages.

    What runs after the last first run counts to the last stage.

    Raises:
        InvalidSchedule: it cannot be carried out.
    """
    simulate(graph, schedule)
    count = len(graph.ops)
    runs = np.zeros((count, count), np.uint16)
    live = np.zeros((count, len(graph.values)), np.bool_)
    ended: dict[int, None] = {}  # dicts keep the order
    come: dict[int, None] = {}
    held: set[int] = set()
    begun = -1  # the last stage of which S is known
    boundary, forward_values = count, None

    def arrive(*values: int) -> None:
        held.update(values)
        come.update(dict.fromkeys(values))

    arrive(*(v for v, value in enumerate(graph.values) if value.placement is Placement.DEVICE))
    for position, step in enumerate(schedule.steps):
        if position == schedule.boundary:
            boundary, forward_values = len(ended), len(come)
            arrive(*graph.tangents)
        match step:
            case Compute(op, implementation):
                stage = min(len(ended), count - 1)
                if stage > begun:
                    live[stage, list(held)] = True
                    begun = stage
                runs[stage, op] += 1
                ended[op] = None
                made = graph.ops[op].implementations[implementation].outputs
                arrive(*(v for v in made if not graph.values[v].external))
            case Free(value):
                held.discard(value)
            case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
                arrive(transfer.value)
    ops, values = list(ended), list(come)
    return Stages(
        ops=tuple(ops),
        values=tuple(values),
        runs=runs[:, ops],
        live=live[:, values],
        boundary=boundary,
        forward_values=len(come) if forward_values is None else forward_values,
    )


def pooled(matrix: npt.NDArray[Any], most: int) -> npt.NDArray[np.float64]:
    """Shrink a matrix to at most `most` rows and columns by joining neighbours.

    Args:
        matrix: of any number type.
        most: rows and columns of the result, at most.

    Returns:
        per cell the share of its entries that are not 0: it is 0 only where all are, so that one alone among
        thousands is never lost.
    """
    cells: npt.NDArray[np.float64] = (matrix != 0).astype(np.float64)
    for axis, size in enumerate(matrix.shape):
        if size > most:
            places = np.arange(0, size, -(-size // most))
            widths = np.diff([*places, size])
            cells = np.add.reduceat(cells, places, axis) / np.expand_dims(widths, 1 - axis)
    return cells
