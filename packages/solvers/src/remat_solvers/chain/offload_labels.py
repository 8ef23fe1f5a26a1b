"""Labels of `offload_table` as numpy records: two queues of values for the links, and dominance of labels.

A queue holds the last few values that joined it; the first one leaves first. A value stays on the device
until all of its bytes are copied.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat_solvers.evaluation.arrays import Floats

QUEUE = 6  # values that a queue distinguishes; those ahead of them count as one
MANY = 8  # times `most`: comparing all pairs of more labels takes too long
FINEST = 4096  # budget levels that distinguish labels, where that leaves few enough
MIX = np.sqrt([2.0, 3.0, 5.0, 7.0, 11.0, 13.0])  # a sum of whole numbers times these distinguishes them

Labels = NDArray[Any]
FIELDS = np.dtype(
    [
        ("lost_s", "f8"),  # waits and repeats
        ("kept", "f8"),
        ("host", "f8"),
        ("out_left", "f8", (QUEUE,)),  # per value bytes to copy, in the order of the copies
        ("out_size", "f8", (QUEUE,)),
        ("out_name", "i8", (QUEUE,)),
        ("back_left", "f8", (QUEUE,)),
        ("back_size", "f8", (QUEUE,)),
        ("back_name", "i8", (QUEUE,)),
        # The label's origin: first stage of its segment, the label there, the choice made there.
        ("stage", "i8"),
        ("label", "i8"),
        ("placement", "i8"),
        ("level", "i8"),  # memory level for recomputing the segment, or KEPT
    ]
)


def undominated(labels: Labels, budget_nbytes: int, most: int, worth_s: float, *, host: bool) -> Labels:
    """At most `most` labels that no other dominates, at the finest rounding that leaves so few.

    If there are far more labels, those that lose more than `worth_s` are dropped first; `host` says whether
    bytes on the host count.
    """
    many = MANY * most
    if len(labels) > many:
        labels = labels[labels["lost_s"] < worth_s]
    measures = np.stack(
        [labels["kept"], labels["host"] * host]
        + [held(labels, queue).sum(axis=1) for queue in ("out", "back")]
        + [labels[f"{queue}_left"].sum(axis=1) for queue in ("out", "back")],
        axis=1,
    )
    order = np.lexsort((*measures.T, labels["lost_s"]))
    labels, measures = labels[order], measures[order]
    levels = FINEST
    while True:
        rounded = np.floor(measures * (levels / max(1, budget_nbytes)))
        # Equal rows have equal sums; other rows with the same one are too rare to matter.
        first = np.sort(np.unique(rounded @ MIX, return_index=True)[1])
        if len(first) <= many:
            first = first[~_beaten(rounded[first])]
            if len(first) <= most or levels == 1:
                return labels[first[:most]]
        levels //= 2


def held(labels: Labels, queue: str) -> Floats:
    """Device bytes of the values in a queue."""
    found: Floats = labels[f"{queue}_size"] * (labels[f"{queue}_left"] > 0)
    return found


def join(labels: Labels, queue: str, nbytes: int, name: int, *, overtakes: bool = False) -> None:
    """Put a value at the end of queue "out" or "back"; in a full queue the first two values are merged.

    If it `overtakes`, the value goes ahead of the last one if that is larger and not started.
    """
    size, left, names = (labels[f"{queue}_{field}"] for field in ("size", "left", "name"))
    last = (left[:, -1] == size[:, -1]) & (size[:, -1] > nbytes) & overtakes
    for field, found, new in (
        ("size", held(labels, queue), nbytes),
        ("left", left, nbytes),
        ("name", names, name),
    ):
        moved = np.roll(found, -1, axis=1)
        moved[:, 0] += 0 if field == "name" else found[:, 0]
        moved[:, -2] = np.where(last, new, found[:, -1])
        moved[:, -1] = np.where(last, found[:, -1], new)
        labels[f"{queue}_{field}"] = moved


def in_both_queues(labels: Labels, queue: str) -> NDArray[np.bool_]:
    """Which values of a queue are in the other one too."""
    other = "back" if queue == "out" else "out"
    here, there = (np.where(labels[f"{q}_left"] > 0, labels[f"{q}_name"], -1) for q in (queue, other))
    found: NDArray[np.bool_] = (here >= 0) & np.any(here[:, :, None] == there[:, None, :], axis=2)
    return found


def drain(labels: Labels, queue: str, nbytes: Floats | float) -> None:
    """Copy bytes of a queue."""
    left = labels[f"{queue}_left"]
    behind = np.cumsum(left, axis=1) - np.reshape(nbytes, (-1, 1))
    labels[f"{queue}_left"] = np.clip(behind, 0.0, left)


def _beaten(measures: Floats) -> NDArray[np.bool_]:
    """Whether an earlier row is nowhere larger."""
    smaller = np.ones((len(measures), len(measures)), bool)
    for column in measures.T:
        smaller &= column[:, None] <= column[None, :]
    return np.asarray(np.triu(smaller, 1).any(axis=0), np.bool_)


def waits(left: Floats, size: Floats, headroom: Floats) -> Floats:
    """Bytes to copy until the values that are still held fit; infinite if they never do."""
    rest = size.sum(axis=1)[:, None] - np.cumsum(size, axis=1)
    through = np.where(rest <= headroom[:, None] + 1e-9, np.cumsum(left, axis=1), np.inf).min(axis=1)
    found: Floats = np.where(size.sum(axis=1) <= headroom + 1e-9, 0.0, through)
    return found
