"""Write files atomically, and clean up after processes that were killed while they wrote.

Data goes to a temporary file in the folder of the target, which then replaces the target in one step. So a
crash or Ctrl-C leaves the old file or the new one. A killed process leaves its temporary file. The writer
holds a lock on it, which ends with the process in any case; so the next writer in that folder knows which
temporary files are abandoned, and removes them.
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
except ImportError:  # Windows, where a file that another process has open cannot be removed
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{8}\.remat-part")
_TRIES = 10


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically.

    The target of a symbolic link is replaced, not the link. Pipes and devices are written to directly.

    Args:
        path: the file, in an existing folder.
        content: text is written as UTF-8.
        private: whether only the user may read the file; a pipe or device is then refused. Otherwise a new
            file has the default mode, and a replaced one keeps its mode.

    Raises:
        OSError: the folder is missing or read-only, the disk is full, or no process reads from the pipe; an
            existing file stays unchanged.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        if private:
            raise OSError(errno.EEXIST, f"{target.name} exists and is not a file")
        if pipes.is_pipe(target):
            pipes.write(target, data)
        else:
            target.write_bytes(data)  # a device cannot be replaced
        return
    _remove_abandoned(target.parent)
    temporary, file = _temporary_beside(target, 0o600 if private else 0o666)
    try:
        with file:
            if not private:
                with suppress(OSError):  # before there is any content to read
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
    """Create a temporary file, open and locked."""
    for _ in range(_TRIES):
        temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.remat-part")
        file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        if fcntl is None:
            return temporary, file
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():  # no other writer removed it before it was locked
            return temporary, file
        file.close()
    raise OSError(f"another process removes temporary files in {target.parent}")


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes that have ended."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                with suppress(OSError):  # it is in use, or belongs to another user
                    _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    if fcntl is None:
        path.unlink()
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
