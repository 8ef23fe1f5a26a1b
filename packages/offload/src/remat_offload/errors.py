"""What can go wrong with host memory and with lanes: one small class a mistake."""

from typing import ClassVar

import attrs

from remat_graph import Lane, RematError
from remat_graph.errors import ProblemError


@attrs.frozen(kw_only=True, str=False)
class HostPoolExhausted(RematError):
    """A block does not fit under the pool's cap. Nothing was allocated.

    Attributes:
        asked_nbytes: what the block would have taken.
        free_nbytes: what the cap leaves beside the blocks that are lent.
        capacity_nbytes: the cap.
    """

    asked_nbytes: int
    free_nbytes: int
    capacity_nbytes: int

    def __str__(self) -> str:
        return (
            f"host pool exhausted: {self.asked_nbytes:,} bytes asked, {self.free_nbytes:,} free "
            f"of {self.capacity_nbytes:,}; release blocks or raise the capacity"
        )


class HostPoolMisuse(ProblemError):
    """What was given to the pool makes no sense, so it did nothing."""

    prefix: ClassVar[str] = "host pool: "


class CannotPin(ProblemError):
    """Host memory could not be pinned."""

    prefix: ClassVar[str] = "cannot pin host memory: "


@attrs.frozen(kw_only=True, str=False)
class LaneFailed(RematError):
    """Work on a lane failed; its ``__cause__`` is the error as it was raised there.

    Attributes:
        lane: the lane.
        work: the name of what failed first: the ticket's own work, or what it came after.
        problem: the error.
    """

    lane: Lane
    work: str
    problem: str

    def __str__(self) -> str:
        problem = " ".join(self.problem.split())
        return (
            f"{self.work!r} failed on the lane {self.lane}: {problem}; what came after it was not run: "
            f"mend its cause, chained to this error, and run the step again"
        )


class MachineMisuse(ProblemError):
    """What was given to a machine makes no sense, so it did nothing."""

    prefix: ClassVar[str] = "machine: "


@attrs.frozen(kw_only=True, str=False)
class RefusedOptimizer(ProblemError):
    """An optimizer whose parameters cannot be stepped one at a time with the results of one step of all.

    Attributes:
        optimizer: the name of its class.
    """

    prefix: ClassVar[str] = "{0.optimizer} cannot be stepped in parts: "
    optimizer: str


class StepMisuse(ProblemError):
    """What was given to the stepper does not fit together."""

    prefix: ClassVar[str] = "optimizer step: "


class OffloadMisuse(ProblemError):
    """Something was asked of a model whose values move that cannot be done; nothing was changed."""

    prefix: ClassVar[str] = "offloading: "


class BadWeights(ProblemError):
    """What was given as a model's weights does not fill it."""

    prefix: ClassVar[str] = "weights: "
