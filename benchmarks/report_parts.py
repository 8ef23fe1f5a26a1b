"""What the pages of results are made of: tables, and figures as text."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

MIB = 1 << 20


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table."""
    names = list(header)
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def percent(ratio: float) -> str:
    """A ratio as text."""
    return f"{100 * ratio:.2f} %"


def mib(nbytes: float) -> str:
    """Bytes in MiB."""
    return f"{nbytes / MIB:.2f}"


def made_with(data: dict[str, Any]) -> str:
    """Date and versions of a file of results."""
    apart = ("date", "machine", "note")
    known = {key: value for key, value in data.items() if isinstance(value, str | int) and key not in apart}
    facts = [f"{key} {value}" for key, value in known.items() if not isinstance(value, bool)]
    machine = f"on {data['machine']} " if "machine" in data else ""
    note = f" ({data['note']})" if data.get("note") else ""
    return f"Made on {data['date']} {machine}with {', '.join(facts)}{note}.\n"


def filled(number: float | None, form: Callable[[float], str]) -> str:
    """A cell, empty where nothing was read."""
    return "" if number is None else form(number)
