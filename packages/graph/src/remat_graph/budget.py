"""Parse memory budgets, and resolve them to bytes for a graph."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import SupportsIndex

import attrs

from remat_graph.errors import BadBudget, shown
from remat_graph.ir import Graph
from remat_graph.schedule import Schedule
from remat_graph.simulator.simulate import simulate
from remat_graph.units import BINARY, DECIMAL, format_nbytes

BudgetLike = SupportsIndex | float | str
"""A budget as users give it: bytes, or text such as ``"2GiB"``, ``"800MB"`` or ``"40%"``."""

LEAST_BARE_NBYTES = 1024
"""The smallest budget that may be text without a unit."""

FAR = 1000
"""A budget without a unit is a mistake if a step needs this many times as much."""

_SCALES: dict[str, int] = {
    unit.lower(): base**power
    for base, units in ((1024, BINARY), (1000, DECIMAL))
    for power, unit in enumerate(units)
}

_PREFIXES = tuple("kmgtp")
"""Units without their B, as other programs read them."""

_AMOUNT = re.compile(
    r"([+-]?[\d_]*\.?\d+|[+-]?\d[\d_]*\.?)(?:e([+-]?\d{1,2}))?\s*([a-z%]*)", re.IGNORECASE | re.ASCII
)


def parse_nbytes(amount: BudgetLike) -> int:
    """Bytes of an int or of text with a unit.

    ``"2GiB"`` and ``"800MiB"`` are binary, ``"2GB"`` and ``"800MB"`` decimal, a bare number is bytes. Case
    does not matter, fractions of a byte are dropped. Zero is a valid size; negative sizes are not.

    Raises:
        BadBudget: the amount is anything else.
    """
    try:
        number, unit, text = _split(amount)
        if unit == "%":
            raise BadBudget(budget=text, problem="a percentage is not a number of bytes")
        return _as_nbytes(number, unit, text)
    except BadBudget as error:
        meant = "" if error.meant.endswith('%"') else error.meant  # a share is no size
        raise attrs.evolve(error, share=False, meant=meant) from None


@attrs.frozen
class Budget:
    """A parsed budget: bytes, or a percentage that a graph resolves to bytes.

    Attributes:
        nbytes: bytes; None for a percentage.
        percent: the percentage; 0 for bytes.
        text: the budget as it came, for messages.
    """

    nbytes: int | None
    percent: float | int
    text: str

    @classmethod
    def parse(cls, budget: BudgetLike) -> "Budget":
        """Parse whole bytes, text with a unit, or a percentage.

        Raises:
            BadBudget: zero, negative, not finite, not whole, a bool, or text that is neither a size nor a
                percentage.
        """
        number, unit, text = _split(budget)
        if number <= 0:
            raise BadBudget(budget=text, problem="is zero" if number == 0 else "is negative")
        if unit == "%":
            return cls(nbytes=None, percent=number, text=text)
        return cls(nbytes=_at_least_one(_as_nbytes(number, unit, text), text), percent=0, text=text)

    @property
    def is_percentage(self) -> bool:
        """Whether the bytes depend on the graph."""
        return self.nbytes is None

    def resolve(self, graph: Graph) -> int:
        """Bytes of the budget for a graph.

        Raises:
            BadBudget: the budget comes to less than one byte.
        """
        if self.nbytes is not None:
            return self.nbytes
        fixed = gradient_nbytes(graph)
        beyond = _share_of(noremat_peak_nbytes(graph) - fixed, self.percent)
        return _at_least_one(min(fixed + beyond, 2**63 - 1), self.text)


def resolve_budget(budget: BudgetLike, graph: Graph) -> int:
    """Bytes of a budget for a graph: whole bytes, text with a unit, or a percentage.

    A percentage such as ``"40%"`` means G + 0.40 (P - G): P is the peak of the unplanned step with ``.grad``
    None, and G its gradients, which no plan can avoid.

    Raises:
        BadBudget: zero, negative, not finite, not whole, a bool, or text that is neither a size nor a
            percentage.
    """
    return Budget.parse(budget).resolve(graph)


def percent_of(nbytes: int, graph: Graph) -> int | None:
    """The least whole percentage that comes to as many bytes for a graph or to more; None if none does."""
    fixed = gradient_nbytes(graph)
    beyond = noremat_peak_nbytes(graph) - fixed
    if beyond <= 0:
        return None
    percent = max(1, -(-100 * (nbytes - fixed) // beyond))
    return percent if _share_of(beyond, percent) >= nbytes - fixed else percent + 1


def _share_of(nbytes: int, percent: float) -> int:
    return math.floor(percent / 100 * nbytes)


def gradient_nbytes(graph: Graph) -> int:
    """Bytes of all gradients, rounded as the allocator does: every plan holds them when the step ends."""
    return sum(graph.allocated_nbytes(grad) for grad in graph.gradients)


def noremat_peak_nbytes(graph: Graph) -> int:
    """Predicted peak bytes of the unplanned step: every op once in trace order, each value freed early."""
    return simulate(graph, Schedule.unplanned(graph)).peak_nbytes


def check_unit(budget: BudgetLike) -> None:
    """Check that a small budget, if it is text, names its unit.

    Raises:
        BadBudget: the budget is invalid, or text below 1024 bytes without a unit.
    """
    parsed = Budget.parse(budget)
    meant = meant_by(budget)
    if meant:
        problem = f"has no unit, so it would be {format_nbytes(parsed.nbytes or 0)}"
        raise BadBudget(budget=parsed.text, problem=problem, meant=meant)


def check_unit_for(budget: BudgetLike, graph: Graph) -> None:
    """Check that a budget in bytes is meant in bytes: a graph in a test may be as small.

    Raises:
        BadBudget: it is a small number without a unit, and the graph needs far more.
    """
    nbytes = Budget.parse(budget).nbytes
    if nbytes is not None and noremat_peak_nbytes(graph) > FAR * nbytes:
        check_unit(budget)


def meant_by(size: BudgetLike, *, share: bool = True) -> str:
    """What a valid budget below 1024 bytes without a unit may mean; empty for any other budget.

    Args:
        size: the budget.
        share: whether it may be a percentage.
    """
    if not isinstance(size, str) or re.search(r"[a-z%]\s*$", size, re.IGNORECASE):
        return ""
    if (Budget.parse(size).nbytes or 0) >= LEAST_BARE_NBYTES:
        return ""
    number = size.strip().removeprefix("+")
    percent = [f'"{number}%"'] if share else []
    return " or ".join([*percent, f'"{number}GiB"'])


def in_one_word(words: Sequence[str]) -> str:
    """The first amount that a command line has in two words, such as ``40 %``, as one; empty if none."""
    for word, unit in pairwise(words):
        number = word.rpartition("=")[2]
        if (unit == "%" or unit.lower() in _SCALES) and number[-1:].isdigit() and _AMOUNT.fullmatch(number):
            return f"{number}{unit}"
    return ""


def _split(amount: object) -> tuple[float | int, str, str]:
    """Return the number, the unit in lower case, and the amount as it came, for messages."""
    if isinstance(amount, str):
        came = repr(amount if len(amount) <= 40 else amount[:37] + "...")
        match = _AMOUNT.fullmatch(amount.strip())
        if match is None or "__" in amount:
            raise BadBudget(budget=came, problem="is neither a size nor a percentage")
        digits, exponent, unit = match.group(1).replace("_", ""), match.group(2), match.group(3).lower()
        if unit not in _SCALES and unit not in ("", "%"):
            problem = f"{shown(match.group(3))} is not a unit"
            number = match.group(0)[: -len(unit)].strip()
            known = unit in _PREFIXES and not number.startswith("-") and number.strip("+0._")
            meant = f'"{number}{unit.upper()}iB"' if known else ""
            raise BadBudget(budget=came, problem=problem, meant=meant)
        if exponent is None and "." not in digits and len(digits) < 30:
            return int(digits), unit, came
        return _finite(float(digits + ("" if exponent is None else f"e{exponent}")), came), unit, came
    came = shown(amount)
    if isinstance(amount, bool):
        raise BadBudget(budget=came, problem="is a bool, not a number of bytes")
    if isinstance(amount, float):
        if not _finite(amount, came).is_integer():
            raise _not_whole(amount, came)
        return int(amount), "b", came
    try:
        return index(amount), "b", came  # type: ignore[arg-type]
    except TypeError:
        raise BadBudget(budget=came, problem=f"is a {type(amount).__name__}") from None


def _not_whole(number: float, text: str) -> BadBudget:
    """The error for a fraction of a byte; a number below 1 is meant as a share."""
    meant = f'"{100 * number:g}%"' if 0 < number < 1 else ""
    return BadBudget(budget=text, problem="is not a whole number of bytes", meant=meant)


def _at_least_one(nbytes: int, text: str) -> int:
    if nbytes <= 0:
        raise BadBudget(budget=text, problem="comes to less than one byte")
    return nbytes


def _finite(number: float, text: str) -> float:
    if not math.isfinite(number):
        raise BadBudget(budget=text, problem="is not a finite number")
    return number


def _as_nbytes(number: float | int, unit: str, text: str) -> int:
    if number < 0:
        raise BadBudget(budget=text, problem="is negative")
    if not unit and number != int(number):
        raise _not_whole(number, text)
    scale: int = _SCALES[unit or "b"]
    nbytes = math.floor(number * scale)
    if nbytes >= 2**63:
        raise BadBudget(budget=text, problem="is more than any machine has")
    return nbytes
