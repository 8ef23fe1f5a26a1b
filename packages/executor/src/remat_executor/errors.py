"""Errors and warnings of the executor: one small class for each mistake."""

import contextlib
import inspect
import warnings
from collections.abc import Iterable
from typing import ClassVar

import attrs

from remat_graph import RematError, format_nbytes
from remat_graph.errors import ProblemError, cut, shown

OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.13"
"""The minor versions of torch between which remat was tested; `pyproject.toml` sets no upper limit."""

_PREFIX = "remat: "
_INTERNAL = (
    "remat_executor",
    "remat_offload",
    "remat_facade",
    "remat_graph",
    "torch",
    "contextlib",
    "weakref",
)


class RematWarning(UserWarning):
    """A planned module does something that a user may not expect; each kind is reported once."""


def warn(message: str) -> None:
    """Warn at the user's line that led here: the innermost frame outside of remat and torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(cut(message), RematWarning, stacklevel=level + 1)


def add_note(error: Exception, note: str) -> None:
    """Add a line to a user's exception that is passed on, once, if its class allows it."""
    if note_on(error) is None:
        with contextlib.suppress(AttributeError, TypeError):  # a class may refuse attributes
            BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), _PREFIX + note])


def note_on(error: BaseException) -> str | None:
    """The line that remat added to a user's exception; None if there is none."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_PREFIX))
    return next((note.removeprefix(_PREFIX) for note in notes), None)


@attrs.frozen(kw_only=True, str=False)
class UnsupportedTorch(RematError):
    """This torch lacks a private name that capture relies on."""

    name: str
    version: str

    def __str__(self) -> str:
        return (
            f"torch {self.version} has no {self.name}: use a torch version "
            f"between {OLDEST_TORCH} and {NEWEST_TORCH}"
        )


class CaptureError(ProblemError):
    """The model's step cannot be turned into one graph."""

    prefix: ClassVar[str] = "cannot capture the model: "


class NothingToDifferentiate(CaptureError):
    """A step returns nothing that requires a gradient."""


class UnplannedUse(ProblemError):
    """The planned module is used in a way that its plan does not cover."""


class BadInput(ProblemError):
    """A planned module cannot be built from these arguments."""


def check_choice(option: str, value: object, choices: Iterable[str], default: str) -> None:
    """Check an option that is one of several words.

    Raises:
        BadInput: it is none of them.
    """
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise BadInput(
            problem=f"{option} is {shown(value)}, not one of {', '.join(map(repr, choices))}",
            advice=f'leave it out for "{default}"',
        )


@attrs.frozen(kw_only=True, str=False)
class WrongPrediction(RematError):
    """A planner predicted a peak that its schedule does not have."""

    solver: str
    predicted_nbytes: int
    peak_nbytes: int

    def __str__(self) -> str:
        return (
            f"the plan of {self.solver!r} predicts a peak of {self.predicted_nbytes} bytes and its schedule "
            f"peaks at {self.peak_nbytes}: make plans with Plan.from_schedule"
        )


@attrs.frozen(kw_only=True, str=False)
class RanksDiffer(RematError):
    """Ranks that share one plan have different graphs or terms."""

    differences: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        return (
            f"the ranks cannot run one plan: {shown}{more}: give every rank the same model, mode, sample "
            'shapes and budget, or let each rank plan for itself with ranks="alone"'
        )


@attrs.frozen(kw_only=True, str=False)
class RankFailed(ProblemError):
    """Another rank could not plan, so none can run the common plan."""

    prefix: ClassVar[str] = "rank {0.rank} could not plan, so no rank can: "
    rank: int


@attrs.frozen(kw_only=True, str=False)
class StepOverBudget(RematError):
    """A runtime, or the allocator under it, needs more memory than planned, and replanning did not help.

    Attributes:
        runtime: its name.
        peak_nbytes: the measured peak; where nothing can be measured before training, a bound of it. It
            includes what the budget includes in addition to the step: reserves, and what is on the device.
        budget_nbytes: the budget.
        advised_nbytes: a budget that leaves enough headroom for plans like the last one.
    """

    runtime: str
    peak_nbytes: int
    budget_nbytes: int
    advised_nbytes: int

    def __str__(self) -> str:
        otherwise = (
            "set PYTORCH_ALLOC_CONF=expandable_segments:True, with which a block is as large as asked for"
            if self.runtime == "eager"
            else 'use runtime="eager"'
        )
        return (
            f"runtime {self.runtime!r} needs {format_nbytes(self.peak_nbytes)} of a budget of "
            f"{format_nbytes(self.budget_nbytes)}, and no plan was found that leaves enough headroom: give "
            f"{format_nbytes(self.advised_nbytes)} ({self.advised_nbytes} bytes), or {otherwise}"
        )
