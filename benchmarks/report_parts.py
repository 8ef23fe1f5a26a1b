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
    facts = [
        f"{key} {value}" for key, value in data.items() if isinstance(value, str | int) and key != "date"
    ]
    return f"Made on {data['date']} with {', '.join(facts)}.\n"


def filled(number: float | None, form: Callable[[float], str]) -> str:
    """A cell, empty where nothing was read."""
    return "" if number is None else form(number)
