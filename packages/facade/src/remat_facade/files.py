"""Write whole files or none: a failure or an interruption leaves what was there before."""

import os
from collections.abc import Callable
from pathlib import Path

from remat_facade.errors import CannotWrite
from remat_graph import wholefile


def check_place(*paths: Path | None) -> None:
    """Find out before long work that its results could not be written.

    Raises:
        CannotWrite: a path's folder cannot be made or written, or the path is a folder.
    """
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(path=path, reason=_reason(error)) from error
        if path.is_dir():
            raise CannotWrite(path=path, reason="it is a folder")
        if not os.access(path.parent, os.W_OK):
            raise CannotWrite(path=path, reason="the folder is read-only")


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
    """Write a file in one step (`remat_graph.wholefile`), in a folder that is made if it is missing.

    Args:
        path: the file.
        content: text is written as UTF-8.

    Raises:
        CannotWrite: the folder or the file cannot be written.
    """
    return save_to(Path(path), lambda path: wholefile.write_whole(path, content))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
