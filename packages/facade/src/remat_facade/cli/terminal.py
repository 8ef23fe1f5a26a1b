"""The terminal side of the command: tables on stdout, progress and errors on stderr.

What a function needs is imported in it, so that help starts quickly.
"""

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

from remat_command import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from remat_facade.planning.planner import Progress
    from remat_facade.report.table import Table
    from remat_graph.contexts import Context

LONG = 1000  # letters: longer lines are shortened, and wider tables broken


def _text(console: "Console", text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(printable(text, console.encoding), style=style)


def show(table: "Table") -> None:
    """Print a table on stdout.

    In a file or a pipe no line is broken, unless ``COLUMNS`` is set. On a narrow terminal, lines break
    between words only, so that names can be read and copied.
    """
    import os

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable

    from remat_facade.cli.widths import as_list, column_widths, line_width

    console = Console(highlight=False)
    bounded = console.file.isatty() or table.prose or os.environ.get("COLUMNS")
    widths = column_widths(table, console.width if bounded else LONG)
    console.print(_text(console, table.title, "bold"))
    if widths is None:
        for line in as_list(table, console.width):
            console.print(_text(console, line), soft_wrap=True)
    else:
        rich = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_header=any(table.columns))
        for index, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
            justify = "right" if index and not table.prose else "left"
            rich.add_column(_text(console, column), justify=justify, width=width)  # type: ignore[arg-type]
        for row in table.rows:
            rich.add_row(*(_text(console, cell) for cell in row))
        console.width = max(console.width, line_width(widths))
        console.print(rich)
    if table.note:
        console.print(_text(console, table.note, "dim"))


def say(line: str) -> None:
    """Print one line on stdout."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(_text(console, line))


def complain(line: str) -> None:
    """Print one line on stderr; line breaks become spaces, and a long line is shortened."""
    import sys

    line = " ".join(line.split())
    if len(line) > LONG:
        from remat_graph.errors import cut  # a mistyped word needs nothing of it

        line = cut(line)
    # Not through rich: its import takes as long as all others here. While it shows the progress, it takes the
    # place of stderr, and would break the line.
    stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    if stderr is None:  # closed before the program began: the exit code still reports the failure
        return
    with suppress(OSError):  # closed since
        stderr.write(printable(f"remat: {line}\n", stderr.encoding or "utf-8"))
        stderr.flush()


def progress(first: str) -> "Context[Progress]":
    """Show the current work on a terminal; show nothing if stderr is a file."""
    from remat_graph.contexts import context

    return context(_status)(first)


def _status(first: str) -> "Generator[Progress, None, None]":
    from rich.console import Console

    console = Console(stderr=True)
    spinner = "dots" if console.encoding.startswith("utf") else "line"
    with console.status(_text(console, first), spinner=spinner) as status:

        def update(line: str) -> None:
            status.update(_text(console, line))

        yield update
