"""Errors for callers of the solvers: one small class a mistake."""

import difflib
import warnings
from typing import ClassVar

import attrs

from remat_graph import RematError, format_nbytes
from remat_graph.budget import FAR, LEAST_BARE_NBYTES
from remat_graph.errors import ProblemError, shown, text_of


class SolverWarning(UserWarning):
    """A solver of the portfolio failed; the result comes from the others."""


def warn(problem: str) -> None:
    """Warn that a part of a search failed, which goes on without it."""
    warnings.warn(f"{problem}: the other methods continue", SolverWarning, stacklevel=4)


def warn_of(part: str, error: Exception) -> None:
    """Warn that a part of a search ended with an error."""
    warn(f"{part} failed ({type(error).__name__}: {text_of(error)})")


@attrs.frozen(kw_only=True, str=False)
class UnknownSolver(RematError):
    """No solver is registered under this name.

    Attributes:
        name: the requested name.
        known: the registered names.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        close = difflib.get_close_matches(shown(self.name).strip("'"), self.known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown solver {shown(self.name)}{hint} (known: {', '.join(self.known)})"


@attrs.frozen(kw_only=True, str=False)
class BadParameter(ProblemError):
    """A solver's parameter has a wrong name or a value out of range.

    Attributes:
        solver: the solver.
    """

    prefix: ClassVar[str] = "solver {0.solver!r}: "
    solver: str


@attrs.frozen(kw_only=True, str=False)
class TableTooLarge(RematError):
    """A dynamic program over stages and memory levels needs too much memory.

    Attributes:
        stages: number of stages.
        slots: requested memory levels.
        nbytes: bytes of the table.
    """

    stages: int
    slots: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"a table of {self.stages} stages and {self.slots} slots needs {format_nbytes(self.nbytes)}: "
            "set fewer slots or fewer stages"
        )


@attrs.frozen(kw_only=True, str=False)
class InfeasibleBudget(RematError):
    """No schedule fits the budget, or none was found.

    Attributes:
        budget_nbytes: the given budget.
        smallest_nbytes: the smallest budget for which a schedule was found.
        smallest_percent: the same as a budget such as "74%", if it is known.
        cut_short: whether a time limit ended that search, so that a smaller budget may work too.
        advice: what to do; empty to say that the budget must be raised.
        floor_nbytes: no schedule exists below this, because of one op.
        floor_op: name of the op that binds there.
        floor_place: the same for people: what the op calls, in which layer.
        floor_op_nbytes: bytes that this op needs alone.
        proven_nbytes: no schedule exists below this either, by another proof; 0 if there is none.
    """

    budget_nbytes: int
    smallest_nbytes: int
    floor_nbytes: int
    floor_op: str
    floor_place: str
    floor_op_nbytes: int
    proven_nbytes: int = 0
    cut_short: bool = False
    smallest_percent: int | None = None
    advice: str = ""

    def __str__(self) -> str:
        least_nbytes = max(self.floor_nbytes, self.proven_nbytes)
        proven = self.budget_nbytes < least_nbytes
        hint = "raise the budget or use a smaller batch"
        if self.advice:
            hint = self.advice
        elif FAR * self.budget_nbytes < self.smallest_nbytes and self.budget_nbytes < LEAST_BARE_NBYTES:
            # gigabytes or percents were meant
            hint = f'a number is bytes: "{self.budget_nbytes}GiB" is a size, "{self.budget_nbytes}%" a share'
        if self.cut_short:
            hint = f"time was up before smaller budgets were tried: raise the time limit, {hint}"
        share = "" if self.smallest_percent is None else f' or "{self.smallest_percent}%"'
        verdict = "no schedule can fit it" if proven else "no schedule was found for it"
        live_nbytes = self.floor_nbytes - self.floor_op_nbytes
        held = f" while {format_nbytes(live_nbytes)} of gradients, outputs and other values must be live"
        where = (
            ", where" if least_nbytes == self.floor_nbytes else ", given what must be kept after large ops;"
        )
        others = held if live_nbytes > self.floor_op_nbytes else ""
        return (
            f"budget {format_nbytes(self.budget_nbytes)} is too small: {verdict}; the smallest budget with a "
            f"schedule is {format_nbytes(self.smallest_nbytes)}{share} ({self.smallest_nbytes} bytes), none "
            f"exists below {format_nbytes(least_nbytes)}{where} {self.floor_place} needs "
            f"{format_nbytes(self.floor_op_nbytes)}{others}; {hint}"
        )


@attrs.frozen(kw_only=True, str=False)
class NoIdleInterval(RematError):
    """A value is to be absent from the device at a time that is no idle interval of the order.

    Attributes:
        value: index of the value.
        after: position of the run after which it was to be swapped out.
        before: position of the run before which it was to be back.
    """

    value: int
    after: int
    before: int

    def __str__(self) -> str:
        return (
            f"value {self.value} cannot be swapped out between runs {self.after} and {self.before}, which are"
            " not consecutive uses of a movable value: choose from `idle_intervals(graph, order)`"
        )
