"""`LanedMachine` runs each lane in a thread of its own, so that a copy can wait for the optimizer.

A ticket comes only after tickets that exist already, so lanes cannot wait for each other in a circle. Work
that fails does not stop its lane. Work that comes after it fails with the same error and is not run.

A forked process does not have its parent's threads: a machine accepts no work there, and to wait for work
that was unfinished at the fork is an error instead of a deadlock.
"""

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import ClassVar, Self

import attrs
import torch
from torch import Tensor

from remat_executor.fork_lock import CHECK_INTERVAL_S
from remat_graph import Lane
from remat_offload.copy_lanes.machine import Ticket, check_copy
from remat_offload.copy_lanes.optimizer_threads import kept_threads, optimizer_threads
from remat_offload.deferred_signals import uninterrupted
from remat_offload.errors import LaneFailed, MachineMisuse
from remat_offload.host_memory.pool import Event

_LANES = (Lane.TO_HOST, Lane.TO_DEVICE, Lane.CPU_OPTIMIZER)
_ELSEWHERE = (
    "a planned module whose values move belongs to the process that made it, and this one was forked from "
    "that process; build the module in the process that trains, or start this process by spawn"
)
_CLOSED = (
    "it was closed, by close() of the module that uses it or by its own, and accepts no more work; call "
    "backward() and step() before close(), or build the module again"
)
_BEGIN_S = 10.0  # how long a lane may take to begin
_PARTING_S = 1.0  # how long a machine that was not closed waits for each lane at its end


class _Thread(threading.Thread):
    """The thread of a lane. It may collect garbage like any other thread, and then runs finalizers."""

    def __init__(
        self,
        queue: "SimpleQueue[Job | None]",
        failures: list["_Failure"],
        dropped: "_Switch",
        name: str,
        kernel_threads: int,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = (queue, failures, dropped)
        self._process = os.getpid()
        self._kernel_threads = kernel_threads
        self.begun = threading.Event()
        self.through = threading.Event()  # set when it has run all jobs of a closed lane

    def run(self) -> None:
        """Run the lane's jobs, without a reference to the machine, which would keep the machine alive."""
        queue, failures, dropped = self._lane
        if self._kernel_threads != torch.get_num_threads():
            torch.set_num_threads(self._kernel_threads)
        self.begun.set()
        while (job := queue.get()) is not None:
            job.run(failures, dropped.on)
        self.through.set()

    def serves(self) -> bool:
        """Whether the thread runs in this process; ``is_alive`` is wrong after an interrupted ``join``."""
        return self._process == os.getpid() and not self.through.is_set()


def outside_of_lanes(function: Callable[[], object]) -> None:
    """Call a function that waits for lanes; called in a lane's thread, start another thread for it."""
    if isinstance(threading.current_thread(), _Thread):
        threading.Thread(target=function, name="remat ending").start()
    else:
        function()


@attrs.define(eq=False)
class _Failure:
    """An error, shared by all tickets that failed because of it, so that it is reported once."""

    lane: Lane
    name: str
    error: BaseException
    reported: bool = False

    def report(self) -> LaneFailed:
        self.reported = True
        return LaneFailed(
            lane=self.lane, work=self.name, problem=f"{type(self.error).__name__}: {self.error}"
        )


@attrs.define(eq=False)
class Job:
    """The ticket of a `LanedMachine`."""

    lane: Lane
    name: str
    thread: _Thread  # runs it, unless it is run at once
    _function: Callable[[Sequence["Job"]], Event | None] | None
    _after: Sequence["Job"]
    _clock: Callable[[], float]
    event: Event | None = attrs.field(default=None, init=False)  # to wait for after its function
    ended_s: float = attrs.field(default=0.0, init=False)  # when its function returned, by the clock
    _failure: _Failure | None = attrs.field(default=None, init=False)
    _ended: threading.Event = attrs.field(factory=threading.Event, init=False)

    def query(self) -> bool:
        """Whether it is done or has failed."""
        return self._ended.is_set() and (self.event is None or self.event.query())

    def synchronize(self) -> None:
        """Block until it is done; raises `LaneFailed`, or as `wait` does."""
        event = self.issued()
        if event is not None:
            event.synchronize()

    def issued(self) -> Event | None:
        """Block until its function has returned; return `event`. Raises as `synchronize` does."""
        self.wait()
        if self._failure is not None:
            raise self._failure.report() from self._failure.error
        return self.event

    def run(self, failures: list[_Failure], dropped: bool) -> None:
        """Run the function, unless the machine was dropped or a job before it has failed."""
        # No reference to its tensors may remain after the end: the waiting thread may drop them then.
        function, after = self._function, self._after
        self._function, self._after = None, ()
        try:
            if dropped:
                raise MachineMisuse(problem="it was dropped unclosed before its lanes were done; use `with`")
            for job in after:
                job.wait()
            self._failure = next((job._failure for job in after if job._failure is not None), None)
            if self._failure is None and function is not None:
                self.event = function(after)
        except BaseException as error:  # noqa: BLE001 - any error: the lane continues, the ticket reports it
            self._failure = _Failure(self.lane, self.name, error)
            failures.append(self._failure)
        del function, after
        self.ended_s = self._clock()
        self._ended.set()

    def has_run(self) -> bool:
        """Whether its function has returned or failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until its function has returned or failed.

        Raises:
            MachineMisuse: it never will: its lane's thread is gone, or is the calling thread.
        """
        while not self._ended.is_set():
            gone = not self.thread.serves() or self.thread is threading.current_thread()
            if gone and not self._ended.is_set():
                raise MachineMisuse(problem=f"{self.name!r} will never be done: {_ELSEWHERE}")
            self._ended.wait(CHECK_INTERVAL_S)


@attrs.define(eq=False)
class _Switch:
    """A flag that threads read; without a lock, since a finalizer may set it at any time."""

    on: bool = False


class LanedMachine(ABC):
    """The lanes of a machine and their threads.

    A subclass adds `release`, `release_after_copies`, `wait_on_compute` and the copies. Use it in a ``with``
    statement, or call ``close``, so that all work is finished. A machine that is dropped, or still open when
    the interpreter ends, fails the jobs that have not begun.

    Attributes:
        device: the device that computes.
        copies_at_once: whether a copy is only issued, so that the calling thread may do it, too.
    """

    copies_at_once: ClassVar[bool] = False

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self._clock = device, clock
        self._process = os.getpid()
        self._lock = threading.RLock()  # a finalizer may close the machine at any time
        self._closed = False
        self._failures: list[_Failure] = []
        self._last: dict[Lane, Job] = {}
        self._queues: dict[Lane, SimpleQueue[Job | None]] = {lane: SimpleQueue() for lane in _LANES}
        dropped = _Switch()
        threads = optimizer_threads(device)
        self._threads = {
            lane: _Thread(queue, self._failures, dropped, f"remat {lane}", threads)
            for lane, queue in self._queues.items()
        }
        with kept_threads() if threads != torch.get_num_threads() else nullcontext():
            for thread in self._threads.values():
                thread.start()
            for thread in self._threads.values():
                thread.begun.wait(_BEGIN_S)
        self._finalizer = weakref.finalize(
            self, _end_threads, self._queues, list(self._threads.values()), dropped
        )

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate on the caller's stream, by PyTorch's allocator."""
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self.device)

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Job:
        """Copy on the lane; see `Machine.copy`."""
        check_copy(self.device, lane, destination, source)
        copy = self._copying(lane, destination, source)
        return self._put(lane, name or "copy", copy, after, at_once=self.copies_at_once)

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Job:
        """Run a function on the lane ``CPU_OPTIMIZER``; see `Machine.work`."""

        def run(jobs: Sequence[Job]) -> None:
            for job in jobs:
                if job.event is not None:
                    job.event.synchronize()
            function()

        return self._put(Lane.CPU_OPTIMIZER, name or "work", run, after)

    def drain(self) -> None:
        """Wait until all lanes are idle; see `Machine.drain`."""
        for job in list(self._last.values()):
            job.wait()
        if self.is_here:
            self._finish_copies()
        while self._failures:
            failure = self._failures.pop(0)
            if not failure.reported:
                raise failure.report() from failure.error

    @property
    def is_here(self) -> bool:
        """Whether the threads of the lanes are in this process."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Check that the machine accepts work; see `Machine.check`."""
        if not self.is_here:
            raise MachineMisuse(problem=_ELSEWHERE)
        if self._closed:
            raise MachineMisuse(problem=_CLOSED)

    def close(self) -> None:
        """Finish the lanes' work and end their threads; see `Machine.close`."""
        if not self.is_here or not self._finalizer.alive:
            return
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.put(None)  # a second one is harmless
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
        """Return a function that copies after jobs and the compute so far, and returns the job's event."""

    def _put(
        self,
        lane: Lane,
        name: str,
        function: Callable[[Sequence[Job]], Event | None],
        after: Iterable[Ticket],
        *,
        at_once: bool = False,
    ) -> Job:
        """Put work on a lane; `at_once` runs it in the calling thread if all earlier work has run."""
        if not self.is_here:
            raise MachineMisuse(problem=f"{name!r} was given to it: {_ELSEWHERE}")
        jobs = tuple(map(as_job, after))
        job = Job(lane, name, self._threads[lane], function, jobs, self._clock)
        with self._lock:
            if self._closed:
                raise MachineMisuse(problem=f"{name!r} was given after {_CLOSED}")
            before = (*jobs, *([self._last[lane]] if lane in self._last else []))
            at_once = at_once and all(earlier.has_run() for earlier in before)
            self._last[lane] = job
            if not at_once:
                self._queues[lane].put(job)
        if at_once:
            job.run(self._failures, dropped=False)
        return job

    @abstractmethod
    def _finish_copies(self) -> None:
        """Wait for copies that the lanes have issued to the device; all lanes are idle."""


def as_job(ticket: Ticket) -> Job:
    """Return a ticket as the `Job` that it is; raise `MachineMisuse` for another machine's."""
    if not isinstance(ticket, Job):
        raise MachineMisuse(
            problem=f"a {type(ticket).__name__} was given as a ticket; give what copy() or work() returned"
        )
    return ticket


def _end_threads(
    queues: Mapping[Lane, "SimpleQueue[Job | None]"], threads: Sequence[_Thread], dropped: _Switch
) -> None:
    """End the threads of a machine that was not closed; jobs that have not begun fail."""
    dropped.on = True
    for queue in queues.values():
        queue.put(None)
    # A daemon that returns from a kernel into an interpreter that has ended can abort the process.
    _join(threads, _PARTING_S)


def _join(threads: Iterable[_Thread], limit_s: float = math.inf) -> None:
    """Wait at most `limit_s` for each thread to end; a lane's own thread does not wait."""
    if isinstance(threading.current_thread(), _Thread):
        return
    for thread in threads:
        until_s = time.monotonic() + limit_s
        while thread.serves() and time.monotonic() < until_s:
            thread.through.wait(CHECK_INTERVAL_S)
        if not thread.serves():
            with uninterrupted():
                thread.join(CHECK_INTERVAL_S)
