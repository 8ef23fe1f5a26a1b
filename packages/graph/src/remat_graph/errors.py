"""What can go wrong with a graph, a schedule or a saved file: one small class a mistake."""

import functools
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar

import attrs

_MOST_TEXT = 2000
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 40, 80


def shown(value: object) -> str:
    """A value of the user's for an error's text: its `repr`, cut where that is long."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # more digits than Python prints
        text = f"<{type(value).__name__}>"
    return cut(" ".join(text.split()), 160)


def text_of(error: BaseException) -> str:
    """What an exception of somebody else's says: its class may say nothing, or raise when it is asked."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code is the user's
        return f"({type(error).__name__} cannot say what it means)"


def cut(text: str, most: int = _MOST_TEXT) -> str:
    """A text without its middle where it is longer than so many characters; advice stands at the end."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 5]} ... {text[-tail:]}"


class RematError(Exception):
    """Base of every error that remat raises on purpose; its text is one line that says what to do.

    However long what it quotes is, the text is not: that holds for every subclass.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__str__" in vars(cls):
            cls.__str__ = _bounded(cls.__str__)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Exceptions rebuild themselves from positional arguments, which keyword-only classes do not take;
        # without this an error raised in a worker process would kill the pool instead of reaching us.
        kind: type[RematError] = type(self)
        fields = attrs.fields_dict(kind) if attrs.has(kind) else {}
        return _rebuild, (kind, self.args, {name: getattr(self, name) for name in fields})


def _bounded(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(text_of)
    def bounded(error: Any) -> str:
        return cut(text_of(error))

    return bounded


def _rebuild(kind: type[RematError], args: tuple[Any, ...], fields: dict[str, Any]) -> RematError:
    return kind(**fields) if fields else kind(*args)


@attrs.frozen(kw_only=True, str=False)
class ProblemError(RematError):
    """A mistake that reads "prefix problem; advice" in one line.

    Attributes:
        prefix: what the error is about; fields of the error are written ``{0.field}``.
        problem: what came, and what was expected.
        advice: what to do about it; empty where the problem says that.
    """

    prefix: ClassVar[str] = ""
    problem: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.prefix.format(self)}{self.problem}{advice}"


@attrs.frozen(kw_only=True, str=False)
class InvalidGraph(ProblemError):
    """The graph breaks a rule of the IR.

    Attributes:
        where: the op or value at fault.
    """

    prefix: ClassVar[str] = "invalid graph: {0.where}: "
    where: str


@attrs.frozen(kw_only=True, str=False)
class InvalidSchedule(ProblemError):
    """A step of a schedule cannot be carried out.

    Attributes:
        step: index of the step, or ``len(steps)`` when the end state is at fault.
    """

    prefix: ClassVar[str] = "invalid schedule: step {0.step}: "
    step: int


@attrs.frozen(kw_only=True, str=False)
class BadFile(ProblemError):
    """A file is not what its reader wants: corrupt, truncated, newer, or of another kind.

    Attributes:
        path: the file.
    """

    prefix: ClassVar[str] = "{0.path}: "
    path: str


class ForeignPlan(BadFile):
    """A saved plan was made for another graph.

    Attributes:
        path: the file.
        problem: what came, what was wanted, what to do.
    """


@attrs.frozen(kw_only=True, str=False)
class OverBudget(RematError):
    """A schedule peaks above the budget that it was made for.

    Attributes:
        solver: who made it.
        peak_nbytes: what the referee says.
        budget_nbytes: what was allowed.
    """

    solver: str
    peak_nbytes: int
    budget_nbytes: int

    def __str__(self) -> str:
        return (
            f"the schedule of {self.solver} peaks at {self.peak_nbytes:,} bytes, above the budget of "
            f"{self.budget_nbytes:,}: raise the budget or solve again"
        )


@attrs.frozen(kw_only=True, str=False)
class FalseBound(RematError):
    """A solver claims that no schedule is as fast as the one at hand.

    Attributes:
        solver: who claims it.
        lower_bound_s: the bound.
        time_s: compute seconds of the schedule, by the referee.
    """

    solver: str
    lower_bound_s: float
    time_s: float

    def __str__(self) -> str:
        return (
            f"{self.solver} claims a lower bound of {self.lower_bound_s:.6g} s, but its schedule takes "
            f"{self.time_s:.6g} s: the bound is wrong, please report it"
        )


@attrs.frozen(kw_only=True, str=False)
class BadBudget(RematError):
    """A budget that says nothing usable.

    Attributes:
        budget: what came, as text.
        problem: what is wrong with it.
        share: whether a share of a step's peak would be one.
    """

    budget: str
    problem: str
    share: bool = True

    def __str__(self) -> str:
        wanted = ["whole bytes such as 2147483648", 'a size such as "2GiB" or "800MB"']
        if self.share:
            wanted.append('a share of the unplanned peak such as "40%"')
        return f"budget {self.budget}: {self.problem}; give {', '.join(wanted[:-1])}, or {wanted[-1]}"


@attrs.frozen(kw_only=True, str=False)
class UnknownPlatform(RematError):
    """No cost platform has this name.

    Attributes:
        name: what came.
        known: the names there are.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = ", ".join(self.known) or "(none installed)"
        return f"no cost platform {shown(self.name)}: choose one of {known}"
