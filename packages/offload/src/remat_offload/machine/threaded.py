"""How lanes are run: each has a thread of its own, so that a copy can wait for what the optimizer does.

A ticket can only come after tickets that exist already, so lanes cannot wait for each other in a circle. Work
that fails does not stop its lane. What comes after it fails too, by the same error, and is not run.

Nobody waits for a thread that is not there. Threads do not come along when a process is forked: there a
machine takes no work, what was done before the fork is done, and what was not never will be.
"""

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import ClassVar, Self

import attrs
import torch
from torch import Tensor

from remat_executor.fork_lock import CHECK_INTERVAL_S
from remat_graph import Lane
from remat_offload.deferred_signals import uninterrupted
from remat_offload.errors import LaneFailed, MachineMisuse
from remat_offload.host_memory.pool import Event
from remat_offload.machine.base import Ticket, check_copy

_LANES = (Lane.TO_HOST, Lane.TO_DEVICE, Lane.CPU_OPTIMIZER)
_ELSEWHERE = (
    "a planned module whose values move belongs to the process that made it, and this one was forked from "
    "that; build the module in the process that trains, or start it by spawn"
)
_CLOSED = (
    "it was closed, by close() of the module that it serves or by its own, and takes no more work; call "
    "backward() and step() before close(), or build the module anew"
)
_PARTING_S = 1.0  # how long a machine that was not closed waits for each lane before it leaves it behind


class _Thread(threading.Thread):
    """The thread of a lane. Garbage may be collected in it as in any other, and ends what it ends there.

    Attributes:
        through: set when it has served its lane to the end.
    """

    def __init__(
        self,
        queue: "SimpleQueue[Job | None]",
        failures: list["_Failure"],
        dropped: "_Switch",
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = (queue, failures, dropped)
        self._process = os.getpid()
        self.through = threading.Event()

    def run(self) -> None:
        """Serve the lane. It knows nothing of the machine, which could not be dropped otherwise."""
        queue, failures, dropped = self._lane
        while (job := queue.get()) is not None:
            job.run(failures, dropped.on)
        self.through.set()

    def serves(self) -> bool:
        """Whether it is there and not through; ``is_alive`` says no once a ``join`` was interrupted."""
        return self._process == os.getpid() and not self.through.is_set()


def outside_of_lanes(function: Callable[[], object]) -> None:
    """Call a function that waits for lanes; in a lane's thread let another one do it, and wait for none."""
    if isinstance(threading.current_thread(), _Thread):
        threading.Thread(target=function, name="remat ending").start()
    else:
        function()


@attrs.define(eq=False)
class _Failure:
    """What went wrong; shared by all tickets that it brought down, so that it is reported once."""

    lane: Lane
    name: str
    error: BaseException
    told: bool = False

    def tell(self) -> LaneFailed:
        self.told = True
        return LaneFailed(
            lane=self.lane, work=self.name, problem=f"{type(self.error).__name__}: {self.error}"
        )


@attrs.define(eq=False)
class Job:
    """The ticket of a `LanedMachine`.

    Attributes:
        lane: its lane.
        name: what errors call it.
        thread: who runs it, unless it is run at once.
        event: what is left to wait for once its function has returned; ``None`` if nothing is.
        ended_s: when its function returned, on the monotonic clock.
    """

    lane: Lane
    name: str
    thread: _Thread
    _function: Callable[[Sequence["Job"]], Event | None] | None
    _after: Sequence["Job"]
    event: Event | None = attrs.field(default=None, init=False)
    ended_s: float = attrs.field(default=0.0, init=False)
    _failure: _Failure | None = attrs.field(default=None, init=False)
    _ended: threading.Event = attrs.field(factory=threading.Event, init=False)

    def query(self) -> bool:
        """Whether it is done, well or badly."""
        return self._ended.is_set() and (self.event is None or self.event.query())

    def synchronize(self) -> None:
        """Block until it is done; raises `LaneFailed`, or as `wait` does."""
        event = self.issued()
        if event is not None:
            event.synchronize()

    def issued(self) -> Event | None:
        """Block until its function has returned; what is left to wait for. Raises as `synchronize` does."""
        self.wait()
        if self._failure is not None:
            raise self._failure.tell() from self._failure.error
        return self.event

    def run(self, failures: list[_Failure], closed: bool) -> None:
        """Do the work, in the lane's thread, unless the machine is gone or what it comes after failed."""
        # Whoever waits for it may drop its tensors then; nothing of them may be left here.
        function, after = self._function, self._after
        self._function, self._after = None, ()
        try:
            if closed:
                raise MachineMisuse(problem="it went, unclosed, before its lanes were through; use `with`")
            for job in after:
                job.wait()
            self._failure = next((job._failure for job in after if job._failure is not None), None)
            if self._failure is None and function is not None:
                self.event = function(after)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the lane goes on and the ticket tells
            self._failure = _Failure(self.lane, self.name, error)
            failures.append(self._failure)
        del function, after
        self.ended_s = time.monotonic()
        self._ended.set()

    def has_run(self) -> bool:
        """Whether its function has returned or failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until its function has returned or failed.

        Raises:
            MachineMisuse: it never will, since its lane's thread is gone, or is the one that asks.
        """
        while not self._ended.is_set():
            gone = not self.thread.serves() or self.thread is threading.current_thread()
            if gone and not self._ended.is_set():
                raise MachineMisuse(problem=f"{self.name!r} will never be done: {_ELSEWHERE}")
            self._ended.wait(CHECK_INTERVAL_S)


@attrs.define(eq=False)
class _Switch:
    """A flag that threads read; no lock, since a finalizer may set it in the midst of anything."""

    on: bool = False


class LanedMachine(ABC):
    """The lanes of a machine and their threads. A subclass adds `discard`, `leave`, `hold` and how copies go.

    Use it in a ``with`` statement, or call ``close``, so that what was given is finished. A machine that is
    dropped, or still open when the interpreter ends, fails the jobs that it has not begun.

    Args:
        device: the device that computes.

    Attributes:
        device: the device that computes.
        copies_at_once: whether a copy is only issued, which the calling thread may do as well as the lane's.
    """

    copies_at_once: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process = os.getpid()
        self._lock = threading.RLock()  # a finalizer may close it in the midst of anything
        self._closed = False
        self._failures: list[_Failure] = []
        self._last: dict[Lane, Job] = {}
        self._queues: dict[Lane, SimpleQueue[Job | None]] = {lane: SimpleQueue() for lane in _LANES}
        dropped = _Switch()
        self._threads = {
            lane: _Thread(queue, self._failures, dropped, f"remat {lane}")
            for lane, queue in self._queues.items()
        }
        for thread in self._threads.values():
            thread.start()
        self._finalizer = weakref.finalize(self, _leave, self._queues, list(self._threads.values()), dropped)

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory from PyTorch's allocator, for what the caller computes."""
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self.device)

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Job:
        """Copy on the lane; see `Machine.copy`."""
        check_copy(self.device, lane, destination, source)
        copy = self._copying(lane, destination, source)
        return self._put(lane, name or "copy", copy, after, at_once=self.copies_at_once)

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Job:
        """Run a function on the lane ``CPU_OPTIMIZER`` once the tickets are done; its result is dropped.

        Raises:
            MachineMisuse: the machine is closed.
        """

        def run(jobs: Sequence[Job]) -> None:
            for job in jobs:
                if job.event is not None:
                    job.event.synchronize()
            function()

        return self._put(Lane.CPU_OPTIMIZER, name or "work", run, after)

    def drain(self) -> None:
        """Wait until all lanes are idle.

        Raises:
            LaneFailed: the first failure that no ``synchronize``, ``hold`` or ``drain`` has raised yet.
            MachineMisuse: in a forked process, work was left to be done at the fork.
        """
        for job in list(self._last.values()):
            job.wait()
        if self.is_here:
            self._finish_copies()
        while self._failures:
            failure = self._failures.pop(0)
            if not failure.told:
                raise failure.tell() from failure.error

    @property
    def is_here(self) -> bool:
        """Whether this is the process that its lanes' threads are in."""
        return self._process == os.getpid()

    def check(self) -> None:
        """See that it takes work.

        Raises:
            MachineMisuse: it is closed, or this process was forked from its own.
        """
        if not self.is_here:
            raise MachineMisuse(problem=_ELSEWHERE)
        if self._closed:
            raise MachineMisuse(problem=_CLOSED)

    def close(self) -> None:
        """Let the lanes finish what was given, then end their threads; nothing can be given any more.

        If it is interrupted, another call waits on.
        """
        if not self.is_here or not self._finalizer.alive:
            return
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.put(None)  # once more does no harm
        _join(self._threads.values())
        self._finish_copies()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.drain()
        finally:
            self.close()

    @abstractmethod
    def _copying(
        self, lane: Lane, destination: Tensor, source: Tensor
    ) -> Callable[[Sequence[Job]], Event | None]:
        """What copies, after jobs and the compute given so far; returns what is left to wait for."""

    def _put(
        self,
        lane: Lane,
        name: str,
        function: Callable[[Sequence[Job]], Event | None],
        after: Iterable[Ticket],
        *,
        at_once: bool = False,
    ) -> Job:
        """Put work on a lane; `at_once` in the calling thread, if nothing before it is left to be run."""
        if not self.is_here:
            raise MachineMisuse(problem=f"{name!r} was given to it: {_ELSEWHERE}")
        jobs = tuple(map(own, after))
        job = Job(lane, name, self._threads[lane], function, jobs)
        with self._lock:
            if self._closed:
                raise MachineMisuse(problem=f"{name!r} was given after {_CLOSED}")
            before = (*jobs, *([self._last[lane]] if lane in self._last else []))
            at_once = at_once and all(earlier.has_run() for earlier in before)
            self._last[lane] = job
            if not at_once:
                self._queues[lane].put(job)
        if at_once:
            job.run(self._failures, closed=False)
        return job

    @abstractmethod
    def _finish_copies(self) -> None:
        """Wait for what lanes have handed on to the device; all of them are idle."""


def own(ticket: Ticket) -> Job:
    """The job behind a ticket.

    Raises:
        MachineMisuse: it is no ticket of a `LanedMachine`.
    """
    if not isinstance(ticket, Job):
        raise MachineMisuse(
            problem=f"a {type(ticket).__name__} was given as a ticket; give what copy or work returned"
        )
    return ticket


def _leave(
    queues: Mapping[Lane, "SimpleQueue[Job | None]"], threads: Sequence[_Thread], dropped: _Switch
) -> None:
    """End the threads of a machine that was not closed, the jobs that did not begin failing."""
    dropped.on = True
    for queue in queues.values():
        queue.put(None)
    # A daemon that returns from a kernel into an interpreter that has ended can abort the process.
    _join(threads, _PARTING_S)


def _join(threads: Iterable[_Thread], limit_s: float = math.inf) -> None:
    """Wait for each thread to end, at most for so long; not in a lane, for which another may be waiting."""
    if isinstance(threading.current_thread(), _Thread):
        return
    for thread in threads:
        until_s = time.monotonic() + limit_s
        while thread.serves() and time.monotonic() < until_s:
            thread.through.wait(CHECK_INTERVAL_S)
        if not thread.serves():
            with uninterrupted():
                thread.join(CHECK_INTERVAL_S)
