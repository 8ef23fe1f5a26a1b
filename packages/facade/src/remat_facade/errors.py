"""What a user can get wrong at the facade: each text one line that says what to do."""

from pathlib import Path
from typing import ClassVar

import attrs

from remat_graph import RematError, format_nbytes
from remat_graph.errors import ProblemError, shown


class PlanNotKept(UserWarning):
    """A plan could not be read from or written to the folder of saved plans; it costs time and no more."""


@attrs.frozen(kw_only=True, str=False)
class MethodNotAvailable(RematError):
    """A method of the literature that this version does not have; nothing else is run in its place.

    Attributes:
        method: its name, as a config type or a solver.
    """

    method: str

    def __str__(self) -> str:
        return (
            f"{self.method} is not in this version, and nothing else runs in its place: "
            'use Hiremate, or another config type such as "auto"'
        )


@attrs.frozen(kw_only=True, str=False)
class BadConfig(ProblemError):
    """A config field holds what it cannot mean, or there is no such field or type.

    Attributes:
        field: the field at fault.
    """

    prefix: ClassVar[str] = "config: {0.field}: "
    field: str


@attrs.frozen(kw_only=True, str=False)
class BadOption(ProblemError):
    """`torch.compile` was given an option that the backend does not take.

    Attributes:
        option: its name, as `shown` writes it.
    """

    prefix: ClassVar[str] = 'torch.compile(backend="remat"): option {0.option} '
    option: str


class BadModel(ProblemError):
    """What was given as the model cannot be planned."""

    prefix: ClassVar[str] = "model: "


class BadSample(ProblemError):
    """The sample is not what the model can be called with."""

    prefix: ClassVar[str] = "sample: "


@attrs.frozen(kw_only=True, str=False)
class BudgetAboveDevice(RematError):
    """The budget is more than the device has, so it bounds nothing.

    Attributes:
        budget: as the user wrote it.
        device: the device, and how much memory it has.
    """

    budget: str
    device: str

    def __str__(self) -> str:
        return f'budget {self.budget} is above {self.device}: give less, or a percentage such as "40%"'


@attrs.frozen(kw_only=True, str=False)
class NothingLeft(ProblemError):
    """``budget="auto"`` comes to nothing."""

    prefix: ClassVar[str] = "budget auto: "


@attrs.frozen(kw_only=True, str=False)
class UnknownOptimizer(RematError):
    """The states of this optimizer cannot be counted.

    Attributes:
        name: as it came.
        known: those that can.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"how large the states of optimizer {shown(self.name)} are is not known: "
            f"name one of {', '.join(self.known)}"
        )


@attrs.frozen(kw_only=True, str=False)
class NotFound(RematError):
    """One method found no schedule within a budget for which there is one.

    Attributes:
        solver: the method.
        budget: what it was given.
        smallest: the smallest budget for which a schedule was found otherwise.
    """

    solver: str
    budget: str
    smallest: str

    def __str__(self) -> str:
        return (
            f"solver {self.solver} found no schedule in {self.budget}, though there are some "
            f"down to {self.smallest}: "
            'use solver "auto", give more time or a larger budget'
        )


@attrs.frozen(kw_only=True, str=False)
class NoRoom(RematError):
    """No plan was found that keeps the budgets of device and host. Nothing was moved or allocated.

    Attributes:
        budget_nbytes: what the device may hold.
        host_budget_nbytes: what the host may.
        least_nbytes: the least budget for which a plan was found; with buffers, inputs and `reserve_nbytes`.
        least_host_nbytes: what the host takes then.
        cut_short: whether a time limit ended the search, so that less may do too.
    """

    budget_nbytes: int
    host_budget_nbytes: int
    least_nbytes: int
    least_host_nbytes: int
    cut_short: bool = False

    def __str__(self) -> str:
        device, host = format_nbytes(self.budget_nbytes), format_nbytes(self.host_budget_nbytes)
        least = f"{format_nbytes(self.least_nbytes)} ({self.least_nbytes} bytes)"
        hint = "raise either budget, or use a smaller batch"
        if self.cut_short:
            hint = f"time was up before all was tried: raise the time limit, {hint}"
        return (
            f"no plan was found within {device} on the device and {host} on the host: the least that one "
            f"takes is {least} on the device with {format_nbytes(self.least_host_nbytes)} on the host; "
            f"{hint}"
        )


@attrs.frozen(kw_only=True, str=False)
class MissingExtra(RematError):
    """A library is needed that remat does not install by itself.

    Attributes:
        library: what to install.
        wanted_for: what it is for.
    """

    library: str
    wanted_for: str

    def __str__(self) -> str:
        return f"{self.wanted_for} needs {self.library}: pip install {self.library}"


@attrs.frozen(kw_only=True, str=False)
class CannotWrite(RematError):
    """A file cannot be written; what stood at its path is untouched.

    Attributes:
        path: where it was to go.
        reason: what the system said.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: cannot be written ({self.reason}): choose another place"


@attrs.frozen(kw_only=True, str=False)
class BadTarget(ProblemError):
    """``MODULE:FACTORY`` does not lead to a function that returns a model and a sample.

    Attributes:
        target: as the user wrote it.
    """

    prefix: ClassVar[str] = "{0.target}: "
    target: str
