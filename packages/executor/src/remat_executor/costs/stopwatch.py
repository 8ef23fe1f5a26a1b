"""Time operators on the CPU by two clocks: seconds that pass, and seconds for which this thread had a core.

Where other processes keep the cores busy, a thread waits for one. The time that passes contains that wait,
the thread's own clock does not; so the latter times kernels that run on one thread. Kernels on several
threads also wait for each other, in part by spinning, which both clocks count. They are timed by the seconds
that pass, and the difference of the clocks shows whether the time is spoiled: on two cores with a load of
five it found all but 33 of 232 operators whose time was more than 1.25 times the calm one. Those 33 took up
to twice as long.
"""

import time
from collections.abc import Callable
from typing import Protocol

import attrs
import torch

from remat_executor.costs.device_timer import Seconds

Thunk = Callable[[], object]
"""Runs an operator once."""
Request = Callable[[], Thunk]
"""Makes the arguments of an operator, and a function that runs it on them."""

_WAITED = 0.2  # of the time; with little load 1 operator in 30 waits longer, on two threads
_GROUP_S = 50e-6
_ENOUGH_S = 20e-3
_AGREE = 0.03  # the fastest quarter of the samples is within 3 %
_FEW, _MANY = 3, 40  # samples
_MOST_S = 0.1  # for all samples, unless there is only one


@attrs.frozen(kw_only=True)
class HostClocks:
    """The two clocks.

    Attributes:
        passed: seconds now.
        worked: seconds for which this thread has had a core; where the system counts them in steps of
            milliseconds, those that passed.
    """

    passed: Callable[[], float] = time.perf_counter
    worked: Callable[[], float] = (
        time.thread_time if hasattr(time, "CLOCK_THREAD_CPUTIME_ID") else time.perf_counter
    )


class Timer(Protocol):
    """Times some runs of an operator."""

    def seconds(self, run: Thunk, runs: int = 1) -> Seconds:
        """The mean seconds of several runs."""


@attrs.define(kw_only=True, eq=False)
class HostStopwatch:
    """Times work on the CPU, which issues nothing.

    Attributes:
        clock: the host's clocks.
        one_thread: whether all work is done by this thread, so that its own clock counts.
        passed_s, worked_s: of all that was timed, by each clock.
    """

    clock: HostClocks
    one_thread: bool
    passed_s: float = attrs.field(default=0.0, init=False)
    worked_s: float = attrs.field(default=0.0, init=False)

    def seconds(self, run: Thunk, runs: int = 1) -> Seconds:
        """The mean seconds of several runs."""
        passed_s, worked_s = self.clock.passed(), self.clock.worked()
        for _ in range(runs):
            run()
        worked_s = self.clock.worked() - worked_s
        passed_s = self.clock.passed() - passed_s
        self.passed_s += passed_s
        self.worked_s += worked_s
        return Seconds((worked_s if self.one_thread else passed_s) / runs, 0.0)

    @property
    def spoiled(self) -> bool:
        """Whether the thread waited for a considerable part of the time, and that counts."""
        return not self.one_thread and self.worked_s < (1 - _WAITED) * self.passed_s


def runs_on_this_thread(key: str) -> bool:
    """Whether an operator, given by its key, starts no threads but torch's: one of torch, or of a way."""
    name = key.removeprefix("again: ").partition("(")[0]
    return name.startswith("aten.") or "." not in name


def stopwatch(key: str, clock: HostClocks) -> HostStopwatch:
    """A stopwatch for an operator under the present number of threads."""
    return HostStopwatch(clock=clock, one_thread=torch.get_num_threads() == 1 and runs_on_this_thread(key))


def seconds_of(thunk: Thunk, timer: Timer, typical: Callable[[list[float]], float] = min) -> Seconds:
    """Seconds of a run, after a first one that is not counted; by default the least of several samples."""
    once = timer.seconds(thunk)
    group = max(1, int(_GROUP_S / max(once.run_s, 1e-7)))
    samples, issued = ([once.run_s], [once.issue_s]) if group == 1 else ([], [])
    spent = once.run_s
    while len(samples) < _MANY and not (len(samples) >= _FEW and spent + group * samples[-1] > _ENOUGH_S):
        if samples and spent + group * samples[-1] > _MOST_S:
            break
        run_s, issue_s = timer.seconds(thunk, group)
        samples.append(run_s)
        issued.append(issue_s)
        spent += group * samples[-1]
        if len(samples) >= _FEW + 2 and lower_quartile(samples) <= (1 + _AGREE) * min(samples):
            break
    return Seconds(typical(samples), typical(issued))


def lower_quartile(samples: list[float]) -> float:
    """The sample than which a quarter are less."""
    return sorted(samples)[len(samples) // 4]
