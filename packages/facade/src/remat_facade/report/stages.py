"""The stage form of a schedule: the ops that run in each stage, and the values live when it begins.

These are the matrices R and S of Jain et al. 2020, "Checkmate", computed from a finished schedule. A step has
as many stages as ops, and each stage ends with the first run of the next op. Recomputations are left of the
diagonal. The result is plain arrays of O(ops x values) entries; `matrix` draws them.
"""

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from remat_graph import Compute, Free, Graph, Lane, Placement, Schedule, Start, simulate


@attrs.frozen(kw_only=True, eq=False)
class StageMatrices:
    """The matrices of a schedule.

    Attributes:
        ops: the op that ends each stage, which is also the column of `runs`, in the order of first runs.
        values: the value of each column of `live`: all values that are ever on the device, in the order in
            which they become live.
        runs: R, ints of shape (stages, ops): number of runs of each op in each stage.
        live: S, booleans of shape (stages, values): whether the value is live when the stage begins. A
            gradient stays live after its delivery, as it does if ``.grad`` was None.
        boundary: number of stages of the forward.
        forward_values: number of values that become live before the backward.
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


def stages(graph: Graph, schedule: Schedule) -> StageMatrices:
    """Divide a schedule into stages; runs after the last first run belong to the last stage.

    Raises:
        InvalidSchedule: the schedule is invalid.
    """
    simulate(graph, schedule)
    count = len(graph.ops)
    runs = np.zeros((count, count), np.uint16)
    live = np.zeros((count, len(graph.values)), np.bool_)
    ended: dict[int, None] = {}  # a dict as an ordered set
    come: dict[int, None] = {}
    held: set[int] = set()
    begun = -1  # the last stage with a complete row in S
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
    return StageMatrices(
        ops=tuple(ops),
        values=tuple(values),
        runs=runs[:, ops],
        live=live[:, values],
        boundary=boundary,
        forward_values=len(come) if forward_values is None else forward_values,
    )


def pooled(matrix: npt.NDArray[Any], most: int) -> npt.NDArray[np.float64]:
    """Shrink a matrix to at most `most` rows and columns by joining adjacent ones.

    Args:
        matrix: of any number type.
        most: rows and columns of the result, at most.

    Returns:
        The share of entries in each cell that are not 0; one such entry among thousands shows too.
    """
    cells: npt.NDArray[np.float64] = (matrix != 0).astype(np.float64)
    for axis, size in enumerate(matrix.shape):
        if size > most:
            starts = np.arange(0, size, -(-size // most))
            widths = np.diff([*starts, size])
            cells = np.add.reduceat(cells, starts, axis) / np.expand_dims(widths, 1 - axis)
    return cells
