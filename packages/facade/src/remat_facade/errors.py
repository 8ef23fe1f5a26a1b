"""Errors of the entry points and the command: one small class per mistake, one line per message."""

from typing import ClassVar

import attrs

from remat_graph import RematError, format_nbytes
from remat_graph.errors import ProblemError, shown


class PlanNotKept(UserWarning):
    """A saved plan could not be read or written; results are unaffected, but the model is planned again."""


class PlanningInterrupted(UserWarning):
    """Ctrl-C ended the search for a plan; the best plan until then is used, and it is not saved."""


@attrs.frozen(kw_only=True, str=False)
class MethodNotAvailable(RematError):
    """The named method is not available in this version; no other method replaces it.

    Attributes:
        method: its name, as a config type or a solver.
    """

    method: str

    def __str__(self) -> str:
        return f'method {self.method} is not available in this version: use Hiremate or config type "auto"'


@attrs.frozen(kw_only=True, str=False)
class BadConfig(ProblemError):
    """A config has an invalid value, an unknown field or an unknown type.

    Attributes:
        field: the field at fault.
    """

    prefix: ClassVar[str] = "config: {0.field}: "
    field: str


@attrs.frozen(kw_only=True, str=False)
class BadOption(ProblemError):
    """An option of `torch.compile` is unknown to the backend or missing.

    Attributes:
        option: its name.
    """

    option: str

    def __str__(self) -> str:
        return f'torch.compile(backend="remat"): option {shown(self.option)} {self.problem}'


class BadModel(ProblemError):
    """The model cannot be planned."""

    prefix: ClassVar[str] = "model: "


class BadSample(ProblemError):
    """The model cannot be called with the sample."""

    prefix: ClassVar[str] = "sample: "


@attrs.frozen(kw_only=True, str=False)
class BudgetAboveDevice(RematError):
    """The budget exceeds the memory of the device, so it bounds nothing.

    Attributes:
        budget: as the user wrote it.
        device: the device and its memory size.
        nbytes: the bytes of a budget that is a percentage, if they are known.
    """

    budget: str
    device: str
    nbytes: int | None = None

    def __str__(self) -> str:
        share = self.budget.rstrip().endswith("%")
        advice = "a smaller percentage" if share else 'less, or a percentage such as "40%"'
        comes = f", which is {format_nbytes(self.nbytes)}," if share and self.nbytes is not None else ""
        return f"budget {self.budget}{comes} exceeds the memory of {self.device}: give {advice}"


class NothingLeft(ProblemError):
    """``budget="auto"`` leaves no bytes, or the free memory of the device is unknown."""

    prefix: ClassVar[str] = "budget auto: "


@attrs.frozen(kw_only=True, str=False)
class UnknownOptimizer(RematError):
    """The size of the optimizer's states is unknown.

    Attributes:
        name: the optimizer, as the user wrote it.
        known: the supported names.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"the size of the states of optimizer {shown(self.name)} is unknown: "
            f"name one of {', '.join(self.known)}"
        )


@attrs.frozen(kw_only=True, str=False)
class NotFound(RematError):
    """One method found no schedule, although another method found one within the same budget.

    Attributes:
        solver: the name of the method.
        budget: the budget, formatted.
        smallest: the smallest budget for which another method found a schedule, formatted.
    """

    solver: str
    budget: str
    smallest: str

    def __str__(self) -> str:
        return (
            f"solver {self.solver} found no schedule within {self.budget}, but schedules exist down to "
            f'{self.smallest}: use solver "auto", a longer time limit or a larger budget'
        )


@attrs.frozen(kw_only=True, str=False)
class NoRoom(RematError):
    """No plan was found within the device and host budgets. Nothing was moved or allocated.

    Attributes:
        budget_nbytes: the device budget.
        host_budget_nbytes: the host budget.
        least_nbytes: the smallest device budget with a plan, including buffers, inputs and `reserve_nbytes`.
        least_host_nbytes: host bytes of that plan.
        smallest_nbytes: what the step of that plan may take, without buffers, inputs and `reserve_nbytes`.
        cut_short: whether a time limit ended the search, so that a smaller budget may work too.
    """

    budget_nbytes: int
    host_budget_nbytes: int
    least_nbytes: int
    least_host_nbytes: int
    smallest_nbytes: int
    cut_short: bool = False

    def __str__(self) -> str:
        device, host = format_nbytes(self.budget_nbytes), format_nbytes(self.host_budget_nbytes)
        least = f"{format_nbytes(self.least_nbytes)} ({self.least_nbytes} bytes)"
        hint = "raise either budget, or use a smaller batch"
        if self.cut_short:
            hint = f"time was up before the search ended: raise the time limit, {hint}"
        return (
            f"no plan was found within {device} on the device and {host} on the host: the smallest plan "
            f"found needs {least} on the device and {format_nbytes(self.least_host_nbytes)} on the host; "
            f"{hint}"
        )


@attrs.frozen(kw_only=True, str=False)
class MissingExtra(RematError):
    """An optional library is missing.

    Attributes:
        library: the name to install.
        wanted_for: what needs it.
    """

    library: str
    wanted_for: str

    def __str__(self) -> str:
        return f"{self.wanted_for} needs {self.library}: pip install {self.library}"


@attrs.frozen(kw_only=True, str=False)
class BadTarget(ProblemError):
    """``MODULE:FACTORY`` does not name a function that returns a model and a sample.

    Attributes:
        target: as the user wrote it.
    """

    prefix: ClassVar[str] = "{0.target}: "
    target: str
