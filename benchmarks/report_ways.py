"""The sections of the pages of results that are about other ways to run ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.report_parts import made_with, table


def rounding(data: dict[str, Any]) -> Iterator[str]:
    """Errors of the ways that round; see rounding.py."""
    yield "## Errors of the ways that round\n"
    yield (
        '`hatch run bench-rounding`: training steps with all ways of one family of `ways="rounding"` on, and '
        "the same steps as captured, against float64: norms of the differences as shares of the norms, over "
        "several inputs. *Worst* is the largest ratio of the errors of one parameter's gradient; at most 1.5 "
        "is allowed. Deep networks in bfloat16 amplify any rounding, so their rows say little; the tests "
        "hold the kernel of activations alone.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        errors = [f"{error:.2e}" for name in ("loss", "gradients") for error in row[name]]
        start = [row["case"], row["family"], str(row["ways"]), row["dtype"]]
        rows.append([*start, *errors, f"{row['worst']:.2f}"])
    head = ("step", "family", "ways", "dtype", "loss", "with ways", "gradients", "with ways", "worst")
    yield from table(head, rows)
