"""Pipes that a user names where a file is wanted, such as ``<(zcat graph.json.gz)``.

Opening a pipe waits until somebody opens its other end, for ever if nobody does. Here it is told after some
seconds. Whoever has opened it may take as long as they like.
"""

import errno
import os
import select
import stat
import time
from collections.abc import Iterator

WAIT_S = 5.0
"""How long the other end of a pipe may take to come."""

_LOOK_S = 0.02
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether there is a pipe of that name."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def chunks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """What is written into a pipe, until its writers are done.

    Raises:
        OSError: it cannot be read, or nobody has it open to write.
    """
    pipe = os.open(path, os.O_RDONLY | _NONBLOCK)
    try:
        while True:
            come = select.select([pipe], [], [], WAIT_S)[0]  # data, or the end of those who wrote
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:  # a writer who takes its time
                continue
            if not (data or come):
                raise OSError(errno.ENXIO, "it is a pipe into which nobody writes")
            if not data:
                return
            yield data
    finally:
        os.close(pipe)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write into a pipe.

    Raises:
        OSError: it cannot be written, or nobody has it open to read.
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
            raise OSError(errno.ENXIO, "it is a pipe from which nobody reads")
        time.sleep(_LOOK_S)
    os.set_blocking(pipe, True)
    with os.fdopen(pipe, "wb") as file:
        file.write(data)
