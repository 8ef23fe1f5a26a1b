"""Write whole files or none: a failure or an interruption leaves what was there before."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from remat_facade.errors import CannotWrite
from remat_graph.serialization import whole_file


def check_places(
    writes: Mapping[str, Path | None], reads: Mapping[str, str | Path | None] | None = None
) -> None:
    """Find out before long work that its results could not be written, or would take each other's place.

    Args:
        writes: what will be written, by the option that names it.
        reads: what is read, which nothing may be written over.

    Raises:
        CannotWrite: a path's folder cannot be made or written, the path is a folder, or another option names
            the same file, however it is spelled.
    """
    places = {option: path for option, path in writes.items() if path is not None}
    for path in places.values():
        _check_place(path)
    # What is not there is not read: it is the name of a solver, say.
    others = {name: Path(path) for name, path in (reads or {}).items() if path and os.path.isfile(path)}
    for option, path in places.items():
        for other, there in others.items():
            if _same_file(path, there):
                raise CannotWrite(path=path, reason=f"{option} names the same file as {other}")
        others[option] = path


def _check_place(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise CannotWrite(path=path, reason="it is a folder")
    except OSError as error:
        raise CannotWrite(path=path, reason=_reason(error)) from error
    if not os.access(path if _is_special(path) else path.parent, os.W_OK):
        raise CannotWrite(path=path, reason="it is read-only, or in a folder that is")


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, to which any number of things may be written."""
    return path.exists() and not path.is_file()


def _same_file(one: Path, two: Path) -> bool:
    """Whether both are one file, by way of links, hard links or another spelling, there or not."""
    try:
        if one.exists() and two.exists():
            return one.is_file() and one.samefile(two)
        one, two = Path(os.path.realpath(one)), Path(os.path.realpath(two))
        return one == two or (one.name == two.name and one.parent.samefile(two.parent))
    except OSError:  # what is not there, or has no name that could be
        return False


def save_to(path: Path, save: Callable[[Path], None]) -> Path:
    """Call `save`, which must write whole files by itself, in a folder that is made if it is missing.

    Raises:
        CannotWrite: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
    except OSError as error:
        raise CannotWrite(path=path, reason=_reason(error)) from error
    return path


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file in one step, in a folder that is made if it is missing.

    Args:
        path: the file.
        content: text is written as UTF-8.

    Raises:
        CannotWrite: the folder or the file cannot be written.
    """
    return save_to(Path(path), lambda path: whole_file.write_whole(path, content))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
