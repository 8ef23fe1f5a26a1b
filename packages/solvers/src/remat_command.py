"""The script `remat`, and how its commands print.

One distribution owns the script, or two would overwrite each other's: remat-solvers, which the facade needs.
What the facade registers in the entry-point group ``remat.command`` gets the whole command line; without it,
saved graphs can be planned (`remat_solvers.command`). This module is alone, since help must start at once.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

GROUP = "remat.command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, that of the facade if it is installed, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for point in entry_points(group=GROUP):
        code: int = point.load()(words)
        return code
    from remat_solvers.command import main as plan_saved_graphs

    return plan_saved_graphs(words)


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
