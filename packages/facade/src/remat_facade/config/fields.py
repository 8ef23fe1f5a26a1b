"""Fields of configs: what each takes, and how it is read from YAML."""

import difflib
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import attrs

from remat_facade.errors import BadConfig
from remat_graph import BadBudget, Links, parse_nbytes
from remat_graph.errors import cut, shown


def option(
    default: Any, doc: str, check: Callable[[Any], str | None], read: Callable[[Any], Any] | None = None
) -> Any:
    """A documented field; `check` returns what is wrong with a value, or None, and `read` makes the value."""

    def validate(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        problem = check(value)
        if problem:
            raise BadConfig(field=field.name, problem=f"{problem}, got {shown(value)}")

    return attrs.field(default=default, validator=validate, converter=read, metadata={"doc": doc})


MOST = 2**63 - 1  # of what nothing is done for each: numbers go into 64-bit ones

LONGEST_S = 1e9  # what may be waited for; clocks cannot count for ever


def whole_number(least: int, most: int = MOST) -> Callable[[object], str | None]:
    """A check for whole numbers within bounds."""
    wanted = (
        f"wants a whole number, {least} or more"
        if most == MOST
        else f"wants a whole number, {least} to {most:,}"
    )

    def check(value: object) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if good else wanted

    return check


def seconds_or_none(value: object) -> str | None:
    """What is wrong with a time limit."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S:
        return None
    return f"wants seconds above 0, up to {LONGEST_S:.0e}, or null for none"


def fraction(value: object) -> str | None:
    """What is wrong with a number from 0 to below 1."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    return None if good else "wants a number from 0 to below 1"


def accounting(value: object) -> str | None:
    """What is wrong with a memory accounting."""
    return None if value in ("referee", "paper") else 'wants "referee" or "paper"'


def plain_name(value: object) -> str | None:
    """What is wrong with a name."""
    return None if isinstance(value, str) and value else "wants the name of a solver that cvxpy has"


def budget_or_none(value: object) -> str | None:
    """What is wrong with an amount of memory that may be left out."""
    good = value is None or (isinstance(value, int | str) and not isinstance(value, bool))
    return None if good else 'wants bytes, a text such as "64GiB", or null'


def flag(value: object) -> str | None:
    """What is wrong with true or false."""
    return None if isinstance(value, bool) else "wants true or false"


def flag_or_none(value: object) -> str | None:
    """What is wrong with true or false, which may be left out."""
    return None if value is None or isinstance(value, bool) else "wants true, false, or null"


def class_or_none(value: object) -> str | None:
    """What is wrong with the name of a class, which may be left out."""
    if value is None or (isinstance(value, str) and value and all(value.split(":"))):
        return None
    return 'wants a class of torch.optim such as "AdamW", "module:Class", or null'


def path_or_none(value: object) -> str | None:
    """What is wrong with a path, which may be left out."""
    return None if value is None or (isinstance(value, str) and value) else "wants a path, or null"


def option_mapping(value: object) -> str | None:
    """What is wrong with an optimizer's options."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return "wants names with values, such as {lr: 0.001}"
    endless = [name for name, option in value.items() if isinstance(option, float) and not isfinite(option)]
    return f"wants a finite {cut(endless[0], 80)}" if endless else None


def read_options(value: Any) -> Any:
    """Keyword arguments as Python has them: YAML takes 1e-5 for a text, and knows no tuples."""
    if not isinstance(value, Mapping):
        return value
    return {name: read_number(option) for name, option in value.items()}


def read_number(value: Any) -> Any:
    """A number as YAML 1.1 leaves it: text such as ``1e-3`` is a number too."""
    if isinstance(value, list | tuple):
        return tuple(map(read_number, value))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read_plain_number(value: Any) -> Any:
    """The same for one number."""
    return read_number(value) if isinstance(value, str) else value


def link_rates(value: object) -> str | None:
    """What is wrong with bandwidths by name."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return 'wants bytes a second by name, such as {to_host_nbytes_per_s: "55GB"}, or null'
    known = [field.name for field in attrs.fields(Links)]
    for name in value:
        if name not in known:
            return f"there is no rate {quoted(name)}{did_you_mean(name, known)}; there are {', '.join(known)}"
    try:
        links_from(value)
    except (BadBudget, OverflowError, TypeError, ValueError):
        return 'wants bytes a second above 0, as numbers or texts such as "55GB"'
    return None


def links_from(rates: Mapping[str, Any]) -> Links:
    """The links of bytes a second by name, as numbers or texts such as "55GB"; null is as if left out.

    Raises:
        BadBudget: a text is no amount of bytes.
        ValueError: a rate is none.
    """
    if not all(type(rate) in (int, float, str, type(None)) for rate in rates.values()):
        raise ValueError("a rate is a number of bytes a second, or a text that says one")
    given = {name: read_number(rate) for name, rate in rates.items() if rate is not None}
    return Links(**{n: float(parse_nbytes(r) if isinstance(r, str) else r) for n, r in given.items()})


def did_you_mean(name: object, known: list[str]) -> str:
    """A suggestion: the known name that is nearest, or nothing."""
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else ()
    return f": did you mean {close[0]}?" if close else ""


def quoted(name: object) -> str:
    """A name from a file for an error: short, and in quotes."""
    return cut(name, 80) if isinstance(name, str) else shown(name)
