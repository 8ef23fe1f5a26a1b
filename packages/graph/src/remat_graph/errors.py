"""Errors of graphs, schedules, budgets and saved files; every error message is bounded in length."""

import difflib
import functools
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs

_MOST_TEXT = 2000
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 40, 80


def shown(value: object) -> str:
    """Text of a user's value for an error message: its `repr`, shortened where it is long."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # more digits than Python prints
        text = f"<{type(value).__name__}>"
    return cut(" ".join(text.split()), 160)


def text_of(error: BaseException) -> str:
    """Text of an exception of any class; a user's class may raise from `__str__`."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code is the user's
        return f"({type(error).__name__} without a readable text)"


def cut(text: str, most: int = _MOST_TEXT) -> str:
    """Shorten a string to `most` characters: the middle is dropped, because advice stands at the end."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 5]} ... {text[-tail:]}"


class RematError(Exception):
    """Base of every error that remat raises on purpose; its text is one line that says what to do.

    The text of every subclass is bounded, however long the quoted values are.
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
    """An error whose text is "prefix problem; advice" in one line.

    Attributes:
        prefix: subject of the error; fields of the error are written ``{0.field}``.
        problem: what came, and what was expected.
        advice: what to do; empty where the problem says that already.
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
    """A file cannot be used: it is corrupt, truncated, too new, or of another kind.

    Attributes:
        path: the file.
    """

    prefix: ClassVar[str] = "{0.path}: "
    path: str


class ForeignPlan(BadFile):
    """A saved plan was made for another graph."""


@attrs.frozen(kw_only=True, str=False)
class CannotWrite(RematError):
    """A file cannot be written; an existing file at the path is unchanged.

    Attributes:
        path: the file.
        reason: the system's message.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: cannot be written ({self.reason}): choose another path"


@attrs.frozen(kw_only=True, str=False)
class OverBudget(RematError):
    """The schedule of a solver, or a saved plan, peaks above its budget.

    Attributes:
        solver: its name.
        peak_nbytes: the peak, by `simulate`.
        budget_nbytes: the budget.
        source: the file of a saved plan; empty for a schedule that a solver has just made.
    """

    solver: str
    peak_nbytes: int
    budget_nbytes: int
    source: str = ""

    def __str__(self) -> str:
        if self.source:
            return (
                f"{self.source} peaks at {self.peak_nbytes:,} bytes, above the budget of "
                f"{self.budget_nbytes:,}: raise the budget, or leave plan= out to plan again"
            )
        return (
            f"the schedule of {self.solver} peaks at {self.peak_nbytes:,} bytes, above the budget of "
            f"{self.budget_nbytes:,}: raise the budget or solve again"
        )


@attrs.frozen(kw_only=True, str=False)
class FalseBound(RematError):
    """A solver claims a lower bound above the compute seconds of its own schedule, `time_s` by `simulate`."""

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
    """A budget cannot be read, or is not a positive number of bytes.

    Attributes:
        budget: the value that came, as text.
        problem: what is wrong with it.
        share: whether a share of a step's peak would be accepted here.
        auto: whether ``"auto"`` would be accepted here.
        meant: what the user probably means, as they would write it; empty if unknown.
        name: what the user calls it, if it is another size.
        sizes: whether text with a unit would be accepted here.
    """

    budget: str
    problem: str
    share: bool = True
    auto: bool = False
    meant: str = ""
    name: str = "budget"
    sizes: bool = True

    def __str__(self) -> str:
        if self.meant:
            return f"{self.name} {self.budget}: {self.problem}; did you mean {self.meant}?"
        wanted = ["whole bytes such as 2147483648"]
        if not self.sizes:
            return f"{self.name} {self.budget}: {self.problem}; give {wanted[0]}"
        wanted.append('a size such as "2GiB" or "800MB"')
        if self.share:
            wanted.append('a percentage such as "40%"')
        if self.auto:
            wanted.append('"auto" for what the device has left')
        return f"{self.name} {self.budget}: {self.problem}; give {', '.join(wanted[:-1])}, or {wanted[-1]}"


@attrs.frozen(kw_only=True, str=False)
class UnknownFamily(RematError):
    """A graph has no other ways to run ops of this family.

    Attributes:
        name: the family that was named.
        known: the families of the graph.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        has = f"it has {', '.join(self.known)}" if self.known else "it has no other ways to run ops"
        close = difflib.get_close_matches(shown(self.name).strip("'"), self.known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"the graph has no ways of a family {shown(self.name)}{hint}: {has}"


@attrs.frozen(kw_only=True, str=False)
class UnknownPlatform(RematError):
    """No platform has the name.

    Attributes:
        name: as the user wrote it.
        known: the registered platforms.
        ending: of the names that may be given without it, such as ``-spec``; empty if none may.
    """

    name: str
    known: tuple[str, ...]
    ending: str = ""

    def __str__(self) -> str:
        device = self.name.removesuffix("_fp16")  # one of Checkmate's names
        if device != self.name and device in self.known:
            advice = f"name {device}, and plan the model in float16, by `--dtype float16` or model.half()"
            return f"no cost platform {shown(self.name)}: a platform has times of every type; {advice}"
        known = ", ".join(self.known) or "(none installed)"
        short = [each.removesuffix(self.ending) for each in self.known if self.ending]
        close = difflib.get_close_matches(shown(self.name).strip("'").lower(), [*short, *self.known], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        also = f"; {self.ending} may be left out" if short else ""
        return f"no cost platform {shown(self.name)}{hint}: choose one of {known}{also}"
