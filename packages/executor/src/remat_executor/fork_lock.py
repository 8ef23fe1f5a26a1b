"""A lock that raises an error where it would hang: in a process forked while another thread held it.

A forked process has a single thread. Locks held by other threads of the parent are never released there, and
work that they began is never finished, so waiting for it would hang.
"""

import os
import threading
from types import TracebackType

import attrs

from remat_graph import RematError

CHECK_INTERVAL_S = 1.0
"""A waiting thread checks this often whether its wait can still end."""


@attrs.frozen(kw_only=True, str=False)
class HeldByParentProcess(RematError):
    """A forked process waits for something that only a thread of its parent could do."""

    what: str

    def __str__(self) -> str:
        return (
            f"forked process: it waits for {self.what}, which a thread of its parent held during the fork; "
            "fork between steps and not while a module is planned, or build the module in this process"
        )


class ForkAwareLock:
    """A re-entrant lock; `what` names the guarded object in messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._acquired_in = 0  # the process that acquired it last

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            HeldByParentProcess: a thread of the parent process holds it.
        """
        while not self._lock.acquire(timeout=CHECK_INTERVAL_S):
            if self._acquired_in != os.getpid():
                raise HeldByParentProcess(what=self._what)
        self._acquired_in = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
