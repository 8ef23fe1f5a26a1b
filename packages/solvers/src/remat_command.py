"""The script `remat`, and how its commands print and end.

One distribution owns the script, or two would overwrite each other's: remat-solvers, which the facade needs.
The entry-point group ``remat.command`` has the commands for saved graphs (`remat_solvers.command`) and, if it
is installed, those of the facade, which are more. This module is alone, since help must start at once.
"""

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version

GROUP = "remat.command"
FACADE, SOLVERS = "facade", "solvers"
"""Names in the group."""

USER_ERROR, INTERRUPTED, UNREAD = 2, 130, 141
"""Exit codes: an error of the user, Ctrl-C, and an output that nobody reads any more, such as that of `head`.

A shell gives the last two to programs that the signals of these end.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, that of the facade if it is installed, and return the exit code."""
    try:
        found = {point.name: point for point in entry_points(group=GROUP)}
        command = (found.get(FACADE) or found[SOLVERS]).load()
        code: int = command(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while modules are imported, or pressed again while the command ends
        sys.stderr.write("remat: interrupted\n")
        return INTERRUPTED
    return code


def printable(text: str, encoding: str) -> str:
    """A string without control sequences: characters that are not printable or not encodable are escaped.

    Args:
        text: any string, possibly from a file, a model or a solver; line breaks are kept.
        encoding: of the output.
    """
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def versions(*distributions: str) -> str:
    """The versions of distributions and of Python, a line each; nothing is imported."""
    found = dict.fromkeys(distributions, "(not installed)")
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return "\n".join(
        f"{name} {number}" for name, number in [*found.items(), ("Python", platform.python_version())]
    )


def give_up_output() -> None:
    """Discard buffered output that cannot be written, or Python would retry at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
