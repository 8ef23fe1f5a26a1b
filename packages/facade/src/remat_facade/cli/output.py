"""What a command shows: tables and lines for people, or with ``--json`` one object for programs."""

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer

from remat_facade.cli.terminal import say, show
from remat_facade.report.table import Table
from remat_graph.serialization.outputs import save_to, write_whole
from remat_solvers.facts import plain


class CommandOutput:
    """Shows tables and lines at the end; with ``--json`` prints `facts`, as the only line of stdout.

    What the user's code prints meanwhile is on stderr then. Nothing is shown before all files are written,
    because a reader of stdout such as `head` may end before.

    Attributes:
        facts: what the object has, besides ``warnings``; nothing is printed while it is empty.
        warnings: those that were given meanwhile; each is also one line on stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.facts: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._as_json = as_json
        self._shown: list[Table | str] = []
        self._redirect = redirect_stdout(sys.stderr)

    def __enter__(self) -> Self:
        self._complain = warnings.showwarning
        warnings.showwarning = self._warned
        if self._as_json:
            self._redirect.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        warnings.showwarning = self._complain
        if self._as_json:
            self._redirect.__exit__(kind, error, traceback)
            if self.facts:
                facts = self.facts | {"warnings": self.warnings}
                typer.echo(json.dumps(plain(facts), allow_nan=False))
            return
        for each in self._shown:
            if isinstance(each, Table):
                show(each)
            else:
                say(each)

    def _warned(self, message: Warning | str, *rest: Any, **named: Any) -> None:
        self.warnings.append(f"{message}")
        self._complain(message, *rest, **named)

    def show(self, *tables: Table) -> None:
        """Show tables at the end, unless the output is JSON."""
        self._shown.extend(tables)

    def say(self, line: str) -> None:
        """Show one line at the end, unless the output is JSON."""
        self._shown.append(line)

    def save(self, path: Path | None, save: Callable[[Path], None]) -> None:
        """Write a file by a function that writes atomically, and report the path; nothing without a path."""
        if path is not None:
            self.wrote(save_to(path, save))

    def write(self, path: Path | None, content: Callable[[], str | bytes]) -> None:
        """Write a file with what a function makes, and report the path; nothing without a path."""
        if path is not None:
            self.wrote(write_whole(path, content()))

    def wrote(self, path: Path) -> None:
        """Report a file that was written."""
        self.facts.setdefault("wrote", []).append(path)
        self.say(f"wrote {path}")
