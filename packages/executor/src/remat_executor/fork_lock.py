"""A lock that says so where it can never be had: in a process that was forked while another thread held it.

A forked process has one thread. What the others of its parent held, or were to finish, stays so for good,
and whoever waits for it there waits for ever.
"""

import os
import threading
from types import TracebackType

import attrs

from remat_graph import RematError

CHECK_INTERVAL_S = 1.0
"""After so long, who waits looks whether what it waits for is still alive."""


@attrs.frozen(kw_only=True, str=False)
class HeldByParentProcess(RematError):
    """A forked process waits for what only a thread of its parent could do.

    Attributes:
        what: what it waits for.
    """

    what: str

    def __str__(self) -> str:
        return (
            f"forked process: it waits for {self.what}, which a thread of its parent had when it was forked; "
            "fork between steps and not while a module is planned, or build the module in this process"
        )


class ForkAwareLock:
    """A re-entrant lock.

    Args:
        what: what it guards, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._taken_in = 0  # the process in which it was taken last

    def __enter__(self) -> None:
        """Take it.

        Raises:
            HeldByParentProcess: a thread of the parent process holds it.
        """
        while not self._lock.acquire(timeout=CHECK_INTERVAL_S):
            if self._taken_in != os.getpid():
                raise HeldByParentProcess(what=self._what)
        self._taken_in = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
