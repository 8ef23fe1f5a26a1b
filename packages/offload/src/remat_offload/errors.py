"""Errors of host memory, machines, optimizers and placement: one small class a mistake."""

from typing import ClassVar

import attrs

from remat_graph import Lane, RematError
from remat_graph.errors import ProblemError


@attrs.frozen(kw_only=True, str=False)
class HostPoolExhausted(RematError):
    """A block does not fit under the pool's cap. Nothing was allocated.

    Attributes:
        asked_nbytes: bytes of the block.
        free_nbytes: bytes that can still be allocated.
        capacity_nbytes: the cap.
    """

    asked_nbytes: int
    free_nbytes: int
    capacity_nbytes: int

    def __str__(self) -> str:
        return (
            f"host pool exhausted: {self.asked_nbytes:,} bytes requested, {self.free_nbytes:,} free "
            f"of {self.capacity_nbytes:,}; release blocks or raise the capacity"
        )


class HostPoolMisuse(ProblemError):
    """An invalid call of the pool, which did nothing."""

    prefix: ClassVar[str] = "host pool: "


class CannotPin(ProblemError):
    """Host memory could not be pinned."""

    prefix: ClassVar[str] = "cannot pin host memory: "


@attrs.frozen(kw_only=True, str=False)
class LaneFailed(RematError):
    """Work on a lane failed; its ``__cause__`` is the original error.

    Attributes:
        lane: the lane.
        work: the name of the work that failed first: the ticket's own, or work that it came after.
        problem: the error, as text.
    """

    lane: Lane
    work: str
    problem: str

    def __str__(self) -> str:
        problem = " ".join(self.problem.split())
        return (
            f"{self.work!r} failed on the lane {self.lane}: {problem}; work that depends on it was not run: "
            f"fix the error chained to this one, and run the step again"
        )


class MachineMisuse(ProblemError):
    """An invalid call of a machine, which did nothing."""

    prefix: ClassVar[str] = "machine: "


@attrs.frozen(kw_only=True, str=False)
class RefusedOptimizer(ProblemError):
    """Stepping this optimizer's parameters one at a time would not give the results of one plain step.

    Attributes:
        optimizer: the name of its class.
    """

    prefix: ClassVar[str] = "{0.optimizer} cannot be stepped in parts: "
    optimizer: str


class StepMisuse(ProblemError):
    """Inconsistent arguments of the stepper."""

    prefix: ClassVar[str] = "optimizer step: "


class OffloadMisuse(ProblemError):
    """An operation that is impossible for a model with offloaded values; nothing was changed."""

    prefix: ClassVar[str] = "offloading: "


class BadWeights(ProblemError):
    """Weights that do not fit the model."""

    prefix: ClassVar[str] = "weights: "
