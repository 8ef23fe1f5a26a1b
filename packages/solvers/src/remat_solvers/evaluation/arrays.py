"""A graph as flat arrays, and the compiled evaluation of op sequences for the inner loops of solvers.

`evaluate(arrays, order)` agrees with `simulate(graph, Schedule.from_order(graph, order))`. It implements the
same memory rule a second time, for speed (10 us at 600 ops); a fuzz test compares the two.

Each op has two variants: index ``2 * op`` is its first run, ``2 * op + 1`` its repeat. Values that are
external or persistent on the device cost nothing and are never freed, so they are left out of the input and
output lists.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph, Op, Placement

Ints = NDArray[np.int64]
Bools = NDArray[np.uint8]
Floats = NDArray[np.float64]


class Arrays(NamedTuple):
    """A graph for compiled loops; ``*_ptr`` and ``*_idx`` are compressed rows, one a variant."""

    time: Floats
    workspace: Ints
    backward: Bools  # per op
    can_rerun: Bools  # per op
    size: Ints  # per value, bytes as the allocator rounds them
    pinned: Bools  # per value
    producer: Ints  # per value, -1 if no op makes it
    tangents: Ints
    base_nbytes: int  # persistent values on the device
    in_ptr: Ints
    in_idx: Ints
    out_ptr: Ints
    out_idx: Ints
    reuse_ptr: Ints
    reuse_out: Ints
    reuse_src: Ints
    credit_ptr: Ints  # inputs whose storage an output takes over if they die there, one for one
    credit_idx: Ints
    guard_ptr: Ints  # external values read that some op overwrites
    guard_idx: Ints
    over_ptr: Ints  # external values that running this overwrites
    over_idx: Ints


@attrs.frozen
class Evaluation:
    """The cost of a sequence."""

    valid: bool  # whether it can run
    peak_nbytes: int  # its peak, if valid
    time_s: float  # its compute time, if valid
    profile: Ints  # per position, bytes held while it runs


def compressed(rows: list[list[int]]) -> tuple[Ints, Ints]:
    """Lists of numbers as one array, and where each begins in it."""
    pointers = np.zeros(len(rows) + 1, np.int64)
    pointers[1:] = np.cumsum([len(row) for row in rows])
    return pointers, np.array([index for row in rows for index in row], np.int64)


def records(fields: str, length: int) -> NDArray[Any]:
    """A record array of zeros; fields are 64-bit integers unless a type is given, as in ``price:f8``."""
    kinds = [(field.split(":")[0], field.split(":")[1] if ":" in field else "i8") for field in fields.split()]
    return np.zeros(length, np.dtype(kinds))


def flatten(graph: Graph) -> Arrays:
    """Convert a graph to arrays."""
    values = graph.values
    # A buffer's next version is external too, but computed before it is read: pinned, of 0 bytes.
    free = [
        (value.external and graph.producer[i] is None) or value.placement is not None
        for i, value in enumerate(values)
    ]
    replaced = {value.replaces for value in values if value.replaces is not None}
    runs = [run for op in graph.ops for run in (op.first, op.implementations[op.rerun or 0])]
    inputs = [[v for v in run.inputs if not free[v]] for run in runs]
    outputs = [[v for v in run.outputs if not free[v]] for run in runs]
    reuses = [
        [(made, source) for made, source in run.reuses if not (free[made] or free[source])] for run in runs
    ]
    guards = [[v for v in run.inputs if v in replaced] for run in runs]
    overwrites = [[old for v in run.outputs if (old := values[v].replaces) is not None] for run in runs]
    pinned = [value.pinned or value.external for value in values]
    in_ptr, in_idx = compressed(inputs)
    out_ptr, out_idx = compressed(outputs)
    reuse_ptr, reuse_made = compressed([[made for made, _ in pairs] for pairs in reuses])
    _, reuse_source = compressed([[source for _, source in pairs] for pairs in reuses])
    credit_ptr, credit_idx = compressed(
        [_credits(pairs, pinned, second_copy=i % 2 == 1) for i, pairs in enumerate(reuses)]
    )
    guard_ptr, guard_idx = compressed(guards)
    over_ptr, over_idx = compressed(overwrites)
    return Arrays(
        time=np.array([run.time_s for run in runs], np.float64),
        workspace=np.array([run.workspace_nbytes for run in runs], np.int64),
        backward=np.array([op.backward for op in graph.ops], np.uint8),
        can_rerun=np.array([_can_rerun(graph, op) for op in graph.ops], np.uint8),
        size=np.array([graph.allocated_nbytes(i) for i in range(len(values))], np.int64),
        pinned=np.array(pinned, np.uint8),
        producer=np.array([-1 if op is None else op for op in graph.producer], np.int64),
        tangents=np.array([v for v in graph.tangents if not free[v]], np.int64),
        base_nbytes=sum(
            graph.allocated_nbytes(i) for i, value in enumerate(values) if value.placement is Placement.DEVICE
        ),
        in_ptr=in_ptr,
        in_idx=in_idx,
        out_ptr=out_ptr,
        out_idx=out_idx,
        reuse_ptr=reuse_ptr,
        reuse_out=reuse_made,
        reuse_src=reuse_source,
        credit_ptr=credit_ptr,
        credit_idx=credit_idx,
        guard_ptr=guard_ptr,
        guard_idx=guard_idx,
        over_ptr=over_ptr,
        over_idx=over_idx,
    )


def _credits(pairs: list[tuple[int, int]], pinned: list[bool], *, second_copy: bool) -> list[int]:
    """Inputs whose storage an output reuses if they die there, of pairs (output, input).

    A repeat makes a `second_copy` of a pinned output.
    """
    taken: set[int] = set()
    sources: list[int] = []
    for made, source in pairs:
        new = made not in taken and source not in sources
        if new and not pinned[source] and not (second_copy and pinned[made]):
            taken.add(made)
            sources.append(source)
    return sources


def _can_rerun(graph: Graph, op: Op) -> bool:
    """Whether an op may run again; not if its repeat writes a buffer, whose versions are written once."""
    if op.rerun is None:
        return False
    return not any(graph.values[v].external for v in op.implementations[op.rerun].outputs)


def evaluate(arrays: Arrays, order: Iterable[int] | Ints) -> Evaluation:
    """Peak and time of a sequence of op indices, as the referee computes them."""
    from remat_solvers.kernels import evaluate

    sequence = np.ascontiguousarray(
        order if isinstance(order, np.ndarray) else np.fromiter(order, np.int64), np.int64
    )
    profile = np.zeros(len(sequence), np.int64)
    if len(sequence) and not 0 <= sequence.min() <= sequence.max() < len(arrays.backward):
        return Evaluation(False, 0, 0.0, profile)
    degree = int(max(np.diff(arrays.in_ptr).max(initial=0), np.diff(arrays.out_ptr).max(initial=0)))
    length = max(len(sequence) * max(1, degree), len(arrays.size), len(arrays.backward))
    work = np.zeros((9, length), np.int64)
    code, _, peak, seconds = evaluate.evaluate(arrays, sequence, profile, work)
    return Evaluation(code == evaluate.VALID, int(peak), float(seconds), profile)
