"""Fields of configs: the default, the documentation, the check and the conversion from YAML of each."""

import difflib
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import attrs

from remat_facade.errors import BadConfig
from remat_graph import BadBudget, Links, parse_nbytes
from remat_graph.errors import cut, shown

Check = Callable[[Any], str | None]
"""Returns what a field expects, or None if the value is valid."""

MOST = 2**63 - 1
"""Largest whole number of a field without another limit: the solvers use 64-bit integers."""

LONGEST_S = 1e9
"""Longest time limit in seconds, within the range of the system's clocks."""


def option(default: Any, doc: str, check: Check, read: Callable[[Any], Any] | None = None) -> Any:
    """A documented field, whose value is `read(value)` and passes `check`."""

    def validate(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        problem = check(value)
        if problem:
            raise BadConfig(field=field.name, problem=f"{problem}, got {shown(value)}")

    return attrs.field(default=default, validator=validate, converter=read, metadata={"doc": doc})


def _expected(what: str, valid: Callable[[Any], bool]) -> Check:
    return lambda value: None if valid(value) else f"expected {what}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def whole_number(least: int, most: int = MOST) -> Check:
    """A check for whole numbers within bounds."""
    bounds = f"{least} or more, below 2^63" if most == MOST else f"{least} to {most:,}"
    return _expected(f"a whole number, {bounds}", lambda v: _is_int(v) and least <= v <= most)


def _seconds_or(null: str) -> Check:
    return _expected(
        f"seconds above 0, up to {LONGEST_S:.0e}, or null for {null}",
        lambda v: v is None or (_is_number(v) and 0 < v <= LONGEST_S),
    )


seconds_or_none = _seconds_or("no limit")
time_limit_or_none = _seconds_or("the default")
seconds_or_zero = _expected(
    f"seconds, up to {LONGEST_S:.0e}", lambda v: _is_number(v) and 0 <= v <= LONGEST_S
)
fraction = _expected("a number from 0 to below 1", lambda v: _is_number(v) and 0 <= v < 1)
accounting = _expected('"referee" or "paper"', lambda v: v in ("referee", "paper"))
ways = _expected(
    '"exact", "rounding" or "none"', lambda v: isinstance(v, str) and v in ("exact", "rounding", "none")
)
outputs = _expected('"kept" or "dropped"', lambda v: isinstance(v, str) and v in ("kept", "dropped"))
gradients = _expected(
    '"auto", "new" or "present"', lambda v: isinstance(v, str) and v in ("auto", "new", "present")
)
plain_name = _expected("the name of a solver of cvxpy", _is_text)
budget_or_none = _expected(
    'bytes, a size such as "64GiB", or null', lambda v: v is None or _is_int(v) or isinstance(v, str)
)
flag = _expected("true or false", lambda v: isinstance(v, bool))
flag_or_none = _expected("true, false, or null", lambda v: v is None or isinstance(v, bool))
class_or_none = _expected(
    'a class of torch.optim such as "AdamW", "module:Class", or null',
    lambda v: v is None or (_is_text(v) and all(v.split(":"))),
)
path_or_none = _expected("a path, or null", lambda v: v is None or _is_text(v))


def family_names(value: object) -> str | None:
    """A check for names of families of ways; the graph says later which ones it has."""
    good = isinstance(value, tuple) and all(map(_is_text, value)) and len(set(value)) == len(value)
    return None if good else "expected a list of families of ways, such as [masks, pools]"


def read_list(value: Any) -> Any:
    """A list of YAML as a tuple; any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def option_mapping(value: object) -> str | None:
    """A check for keyword arguments of an optimizer."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return "expected names with values, such as {lr: 0.001}"
    infinite = [name for name, option in value.items() if isinstance(option, float) and not isfinite(option)]
    return f"expected a finite {cut(infinite[0], 80)}" if infinite else None


def read_options(value: Any) -> Any:
    """Keyword arguments as Python values: YAML reads 1e-5 as a string, and has no tuples."""
    if not isinstance(value, Mapping):
        return value
    return {name: read_number(option) for name, option in value.items()}


def read_number(value: Any) -> Any:
    """A number that YAML 1.1 reads as a string, such as ``1e-3``; a list becomes a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(read_number, value))
    return read_plain_number(value)


def read_plain_number(value: Any) -> Any:
    """A string as a float if it is one; any other value unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def link_rates(value: object) -> str | None:
    """A check for bandwidths by name."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return 'expected bytes per second by name, such as {to_host_nbytes_per_s: "55GB"}, or null'
    if not isinstance(value.get("start_s", 0.0), int | float):
        return f"start_s: expected seconds as a number, not {quoted(value['start_s'])}"
    known = [field.name for field in attrs.fields(Links)]
    for name in value:
        if name not in known:
            hint = did_you_mean(name, known)
            return f"unknown name {quoted(name)}{hint}; expected one of {', '.join(known)}"
    try:
        links_from(value)
    except (BadBudget, OverflowError, TypeError, ValueError):
        return 'expected bytes per second above 0, as numbers or sizes such as "55GB", and start_s in seconds'
    return None


def links_from(rates: Mapping[str, Any]) -> Links:
    """The links with these bandwidths in bytes per second, as numbers or sizes such as "55GB".

    A rate that is None is ignored.

    Raises:
        BadBudget: a string is not a size.
        ValueError: a rate is neither a number nor a string, or is out of range.
    """
    if not all(type(rate) in (int, float, str, type(None)) for rate in rates.values()):
        raise ValueError('expected bytes per second, as numbers or sizes such as "55GB"')
    given = {name: read_number(rate) for name, rate in rates.items() if rate is not None}
    return Links(**{n: float(parse_nbytes(r) if isinstance(r, str) else r) for n, r in given.items()})


def did_you_mean(name: object, known: list[str]) -> str:
    """A suggestion: the nearest known name, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else ()
    return f" (did you mean {close[0]}?)" if close else ""


def quoted(name: object) -> str:
    """A name from a file for an error message, shortened."""
    return cut(name, 80) if isinstance(name, str) else shown(name)
