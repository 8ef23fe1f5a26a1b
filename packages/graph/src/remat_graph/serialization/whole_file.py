"""Write files whole or not at all, and leave nothing of a process that was killed while it wrote.

What is written goes to a temporary file beside the target, which then takes the target's place in one step:
so a crash or Ctrl-C leaves the old file or the new one. A kill leaves the temporary file. Its writer holds a
lock on it, which ends with the process however that ends; so the next writer in that folder knows which
temporary files are nobody's, and removes them.
"""

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from remat_graph.serialization import pipes

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that another process has open
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{8}\.remat-part")
_TRIES = 10


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, private: bool = False) -> None:
    """Write a file in one step.

    A link stays one: what it points to is replaced. A pipe or a device is written to.

    Args:
        path: the file, in a folder that there is.
        content: text is written as UTF-8.
        private: whether nobody but the user may read it, and what it replaces must be a file; else a new
            file has the mode that any program's has, and one that is replaced keeps its own.

    Raises:
        OSError: the folder is missing or read-only, the disk is full, or nobody reads from the pipe; an
            existing file is as it was.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        if private:
            raise OSError(errno.EEXIST, f"{target.name} is there and is no file")
        if pipes.is_pipe(target):
            pipes.write(target, data)
        else:
            target.write_bytes(data)  # nothing there to replace
        return
    _remove_abandoned(target.parent)
    temporary, file = _temporary_beside(target, 0o600 if private else 0o666)
    try:
        with file:
            if not private:
                with suppress(OSError):  # before there is anything to read
                    shutil.copymode(target, temporary)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(temporary, target)  # while it is locked
        if fcntl is None:
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _temporary_beside(target: Path, mode: int) -> tuple[Path, IO[bytes]]:
    """A new file of ours, open and locked."""
    for _ in range(_TRIES):
        temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.remat-part")
        file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        if fcntl is None:
            return temporary, file
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():  # nobody took it for abandoned before it was locked
            return temporary, file
        file.close()
    raise OSError(f"somebody removes temporary files in {target.parent}")


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes that are no more."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                with suppress(OSError):  # it is in use, or somebody else's
                    _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    if fcntl is None:
        path.unlink()
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
