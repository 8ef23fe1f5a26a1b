"""Fit a table into the width of a terminal, without breaking a name or a figure."""

import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from remat_facade.report.table import Table

FIGURE = 12
"""Letters: a cell that is no longer, such as ``1.04 GiB``, stays on one line."""

_KEPT = "\0"  # a space at which no line is broken
_BETWEEN, _EDGES = 3, 2  # letters between two columns, and at both ends of a line


def column_widths(table: Table, width: int) -> list[int] | None:
    """The width of each column, in letters, in a terminal of some width.

    The widest columns are narrowed first, down to their longest word.

    Returns:
        None if that is not enough.
    """
    columns = list(zip(table.columns, *table.rows, strict=True))
    widths = [max(map(cell_len, cells)) for cells in columns]
    least = [max(map(_unbroken, cells)) for cells in columns]
    if line_width(least) > width:
        return None
    while line_width(widths) > width:
        widest = max((i for i, each in enumerate(widths) if each > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def line_width(widths: Sequence[int]) -> int:
    """The width of a line with columns of these widths."""
    return _EDGES + sum(widths) + _BETWEEN * (len(widths) - 1)


def _unbroken(cell: str) -> int:
    """The width that a cell needs at least."""
    length = cell_len(cell)
    return length if length <= FIGURE else max(map(cell_len, cell.split()))


def as_list(table: Table, width: int) -> Iterator[str]:
    """The rows of a table one below the other: the name, then each other cell with a value, by its head.

    Lines are at most `width` letters wide, unless a name is longer.
    """
    yield ""
    for name, *cells in table.rows:
        yield f" {name or '-'}"
        said = [f"{head} {cell}".strip() for head, cell in zip(table.columns[1:], cells, strict=True) if cell]
        kept = "; ".join(each.replace(" ", _KEPT) if len(each) <= 2 * FIGURE else each for each in said)
        lines = textwrap.wrap(kept, width - 3, break_long_words=False, break_on_hyphens=False)
        yield from (f"   {line.replace(_KEPT, ' ')}" for line in lines)
    yield ""
