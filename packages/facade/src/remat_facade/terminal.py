"""The terminal side of the command: tables on stdout, progress and errors on stderr."""

import os
import sys
from collections.abc import Generator
from contextlib import suppress

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from remat_facade.planner import Progress
from remat_facade.report.table import Table
from remat_graph.contexts import context
from remat_graph.errors import cut


def show(table: Table) -> None:
    """Print a table on stdout."""
    rich = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="right" if index and not table.prose else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    console.print(Text(table.title, style="bold"))
    console.print(rich)
    if table.note:
        console.print(Text(table.note, style="dim"))


def say(line: str) -> None:
    """Print one line on stdout."""
    Console(highlight=False, soft_wrap=True).print(Text(line))


def complain(line: str) -> None:
    """Print one line on stderr; what would break it into several is folded, and a long one cut."""
    with suppress(OSError):  # where nobody listens, the exit code still tells
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(Text(f"remat: {cut(' '.join(line.split()))}"))


def give_up_output() -> None:
    """Drop what the output does not take, which Python would try to write again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@context
def progress(first: str) -> Generator[Progress, None, None]:
    """Show on a terminal what is being done; nothing where stderr is a file."""
    with Console(stderr=True).status(Text(first)) as status:

        def tell(line: str) -> None:
            status.update(Text(line))

        yield tell
