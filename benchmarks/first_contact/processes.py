"""Rows in a process of their own: one that aborts, or does not end, costs one row.

The process prints a line when it begins a row and a line with the row, as JSON behind a mark; its other
lines are kept to say what went wrong. If it ends inside of a row, that row is returned with a note and
another process runs the rest.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MARK = "@first-contact "
_KEPT_LINES = 12


def announce(**message: Any) -> None:
    """Print one message of the process."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def on_the_test_device() -> bool:
    """Whether the project's test device stands in for CUDA in this process."""
    return "tests.device.torch_cuda" in sys.modules


def interpreter() -> list[str]:
    """What runs a script as this process does: Python, or Python on the test device."""
    return [sys.executable, *(["-m", "tests.device"] if on_the_test_device() else [])]


def rows_of(
    command: Callable[[Sequence[str]], Sequence[str]],
    names: Sequence[str],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    group: "Group | None" = None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Run rows in processes until all are done or the time is over.

    Args:
        command: what runs the rows of these names.
        names: of the rows.
        limit_s: seconds for all of them.
        environment: of the processes; None for that of this one.
        clock: gives seconds.
        group: ends the processes of several threads.

    Yields:
        The name of each row that was begun with what it gave, or with "wrong" if its process ended, and
        "cut" if that was because no time was left.
    """
    end_s = clock() + limit_s
    group = group or Group()
    left = list(names)
    while left and clock() < end_s and not group.ended.is_set():
        begun: str | None = None
        log: deque[str] = deque(maxlen=_KEPT_LINES)
        with _Process(command(left), environment, group) as process:
            for line in process.lines(lambda: end_s - clock()):
                if not line.startswith(MARK):
                    log.append(line)
                    continue
                message = json.loads(line.removeprefix(MARK))
                if "begin" in message:
                    begun = message["begin"]
                else:
                    yield message["name"], message["row"]
                    left.remove(message["name"])
                    begun = None
        if begun is None and left and process.status is not None:  # it could not begin
            begun = left[0]
        if begun is not None:
            why = _why(process.status, limit_s)
            yield begun, {"wrong": [f"{why}: {_last(log)}"], "cut": process.status is None}
            left.remove(begun)


class Group:
    """Processes that several threads run."""

    def __init__(self) -> None:
        self.running: set[_Process] = set()
        self.ended = threading.Event()

    def end(self) -> None:
        """End all of them; none is begun any more."""
        self.ended.set()
        for process in list(self.running):
            process.kill()


class _Process:
    """A process, ended with all that it started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None, group: "Group") -> None:
        self.status: int | None = None
        self._group = group
        self._running = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "_Process":
        self._group.running.add(self)
        if self._group.ended.is_set():
            self.kill()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self.kill()
            self._running.wait()
        self._reader.join()
        self._group.running.discard(self)

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._running.stdout is not None
        with self._running.stdout as lines:
            for line in lines:
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def lines(self, left_s: Callable[[], float]) -> Iterator[str]:
        """Its lines, until it ends or no time is left; `status` is None then."""
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, left_s()))
            except queue.Empty:
                return
            if line is None:
                self.status = self._running.wait()
                return
            if line:
                yield line


def _why(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"not done when the {limit_s:.0f} s of its section were over"
    return f"its process ended with status {status}"


def _last(log: Sequence[str]) -> str:
    return " | ".join(line.strip() for line in list(log)[-3:])[:400]
