"""The option `remat --version`."""

import typer

from remat_command import versions

PACKAGES = ("remat-facade", "remat-executor", "remat-offload", "remat-solvers", "remat-graph")


def show_version(asked: bool) -> None:
    """Print the versions of all packages, Python and torch, and end the command, if the option is given."""
    if asked:
        typer.echo(versions(*PACKAGES, "torch"))
        raise typer.Exit
