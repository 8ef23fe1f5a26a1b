"""The option `remat --version`."""

import typer

from remat_facade import __version__


def show_version(asked: bool) -> None:
    """Print the version and end the command, if the option is given."""
    if asked:
        typer.echo(f"remat {__version__}")
        raise typer.Exit
