"""What can go wrong between a model and its planned module: one small class a mistake."""

import contextlib
import inspect
import warnings
from typing import ClassVar

import attrs

from remat_graph import RematError
from remat_graph.errors import ProblemError, cut

_OURS = "remat: "
_BETWEEN = (
    "remat_executor",
    "remat_offload",
    "remat_facade",
    "remat_graph",
    "torch",
    "contextlib",
    "weakref",
)


class RematWarning(UserWarning):
    """A planned module does something a user may not expect; said once."""


def warn(message: str) -> None:
    """Warn at the line of the user's that led here: neither in remat nor in torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(cut(message), RematWarning, stacklevel=level + 1)


def add_note(error: Exception, note: str) -> None:
    """Add a line to a user's exception that is passed on, if its class lets us; once."""
    if note_on(error) is None:
        with contextlib.suppress(AttributeError, TypeError):  # past a class that lets nobody set anything
            BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), _OURS + note])


def note_on(error: BaseException) -> str | None:
    """What remat says of a user's exception that it passes on; None if it says nothing."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_OURS))
    return next((note.removeprefix(_OURS) for note in notes), None)


@attrs.frozen(kw_only=True, str=False)
class UnsupportedTorch(RematError):
    """This torch lacks a private name that capture relies on."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"torch {self.version} has no {self.name}: use a torch version between 2.11 and 2.13"


class CaptureError(ProblemError):
    """The model's step cannot be turned into one graph."""

    prefix: ClassVar[str] = "cannot capture the model: "


class NothingToDifferentiate(CaptureError):
    """A step returns nothing that requires a gradient."""


class UnplannedUse(ProblemError):
    """The planned module is used in a way that its plan does not cover."""


class BadInput(ProblemError):
    """What was given to build a planned module cannot work."""


@attrs.frozen(kw_only=True, str=False)
class WrongPrediction(RematError):
    """A planner promised a peak that its schedule does not have."""

    solver: str
    promised_nbytes: int
    peak_nbytes: int

    def __str__(self) -> str:
        return (
            f"the plan of {self.solver!r} promises a peak of {self.promised_nbytes} bytes and its schedule "
            f"has {self.peak_nbytes}: make plans with Plan.from_schedule"
        )


@attrs.frozen(kw_only=True, str=False)
class RanksDiffer(RematError):
    """Ranks that were to run one plan have different graphs, or were given different terms."""

    differences: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        return (
            f"the ranks cannot run one plan: {shown}{more}: give every rank the same model, mode, sample "
            'shapes and budget, or let each plan for itself with ranks="alone"'
        )


@attrs.frozen(kw_only=True, str=False)
class RankFailed(ProblemError):
    """Another rank could not plan, so none can run the common plan."""

    prefix: ClassVar[str] = "rank {0.rank} could not plan, so no rank can: "
    rank: int


@attrs.frozen(kw_only=True, str=False)
class OverCompiled(RematError):
    """A step takes more when a runtime runs it than its plan says, and no tighter plan was found.

    Attributes:
        runtime: its name.
        peak: what the step took.
        budget: what it may take.
        advised: a budget that leaves room.
    """

    runtime: str
    peak: str
    budget: str
    advised: str

    def __str__(self) -> str:
        return (
            f"runtime {self.runtime!r} takes {self.peak} of a budget of {self.budget}, and no plan was found "
            f'that leaves it room: give about {self.advised}, or use runtime="eager"'
        )
