"""What a caller of the solvers can get wrong: one small class a mistake."""

import difflib
from typing import ClassVar

import attrs

from remat_graph import RematError, format_nbytes
from remat_graph.errors import ProblemError, shown


class SolverWarning(UserWarning):
    """A solver of the portfolio failed; the answer comes from the others."""


@attrs.frozen(kw_only=True, str=False)
class UnknownSolver(RematError):
    """No solver is registered under this name.

    Attributes:
        name: what was asked for.
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
    """A dynamic program over stages and memory levels would take too much memory.

    Attributes:
        stages: how many there are.
        slots: memory levels that were asked for.
        nbytes: what the table would take.
    """

    stages: int
    slots: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"a table of {self.stages} stages and {self.slots} slots takes {format_nbytes(self.nbytes)}: "
            "ask for fewer slots or fewer stages"
        )


@attrs.frozen(kw_only=True, str=False)
class InfeasibleBudget(RematError):
    """No schedule fits the budget, or none was found.

    Attributes:
        budget_nbytes: the budget that came.
        smallest_nbytes: the smallest budget for which a schedule was found; it then works.
        cut_short: whether a time limit ended the search for it, so that less may work too.
        floor_nbytes: below this none exists.
        floor_op: the op that binds there.
        floor_op_nbytes: what that op alone needs at that moment.
    """

    budget_nbytes: int
    smallest_nbytes: int
    floor_nbytes: int
    floor_op: str
    floor_op_nbytes: int
    cut_short: bool = False

    def __str__(self) -> str:
        proven = self.budget_nbytes < self.floor_nbytes
        hint = "raise the budget or use a smaller batch"
        if self.cut_short:
            hint = f"time was up before smaller budgets were tried: raise the time limit, {hint}"
        verdict = "no schedule can fit it" if proven else "no schedule was found for it"
        return (
            f"budget {format_nbytes(self.budget_nbytes)} is too small: {verdict}; the smallest budget with a "
            f"schedule is {format_nbytes(self.smallest_nbytes)} ({self.smallest_nbytes} bytes), none exists "
            f"below {format_nbytes(self.floor_nbytes)}, where {self.floor_op} needs "
            f"{format_nbytes(self.floor_op_nbytes)}; {hint}"
        )


@attrs.frozen(kw_only=True, str=False)
class NoGap(RematError):
    """A value is to be away at a time that is no gap of the order.

    Attributes:
        value: index of the value.
        after: position of the run after which it was to leave.
        before: position of the run before which it was to be back.
    """

    value: int
    after: int
    before: int

    def __str__(self) -> str:
        return (
            f"value {self.value} cannot be away between runs {self.after} and {self.before}: these are "
            "no neighbouring uses of one that can move; choose from `gaps(graph, order)`"
        )
