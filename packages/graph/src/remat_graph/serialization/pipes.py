"""Read and write pipes that a user names instead of a file, such as ``<(zcat graph.json.gz)``.

Opening a pipe normally blocks until a process opens its other end, for ever if none does. Here it fails after
`WAIT_S` seconds. A process that has opened its end may take any time.
"""

import errno
import os
import select
import stat
import time
from collections.abc import Iterator

WAIT_S = 5.0
"""Seconds to wait for another process to open the pipe."""

_LOOK_S = 0.02
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a pipe."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def chunks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The data that is written into a pipe, until its writers close it.

    Raises:
        OSError: the pipe cannot be read, or no process has it open to write.
    """
    pipe = os.open(path, os.O_RDONLY | _NONBLOCK)
    try:
        while True:
            ready = select.select([pipe], [], [], WAIT_S)[0]  # data, or all writers have closed
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:  # a writer has opened the pipe and has not written yet
                continue
            if not (data or ready):
                raise OSError(errno.ENXIO, "it is a pipe into which no process writes")
            if not data:
                return
            yield data
    finally:
        os.close(pipe)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write into a pipe.

    Raises:
        OSError: the pipe cannot be written, or no process has it open to read.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            pipe = os.open(path, os.O_WRONLY | _NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        if time.monotonic() > until_s:
            raise OSError(errno.ENXIO, "it is a pipe from which no process reads")
        time.sleep(_LOOK_S)
    os.set_blocking(pipe, True)
    with os.fdopen(pipe, "wb") as file:
        file.write(data)
