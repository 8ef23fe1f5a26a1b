"""Measure operators again that waited for a core, because other processes kept the cores busy.

Those are operators on several threads: on one thread, the time leaves the wait out. They may be spoiled each
time, since when a thread has no core, the others wait for it, and 20 us become 20 ms. The second measurement
is later than the first, and the shorter of the two counts. The operator also runs on one thread, by that
thread's own clock; the median speedup that several threads bring to operators of about that length then gives
another time, which counts if it is shorter. All that waited twice are doubtful: their times are estimates,
which ``measure`` replaces when the cores are idle.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs
import torch

from remat_executor.costs.cache import MeasuredCost
from remat_executor.costs.failures import failures_named
from remat_executor.costs.stopwatch import (
    Clock,
    Request,
    Stopwatch,
    runs_on_this_thread,
    seconds_of,
    stopwatch,
)
from remat_executor.errors import warn

_SLOWER = 1.25  # than on one thread: no idle machine is, but for operators of some microseconds
_ALIKE = 2.0  # lengths within this factor
_FEW = 3  # operators to take a speedup from
_BUSY = (
    "other processes keep the cores busy: operator times are estimates, and plans may be slower; "
    "on an idle machine they are measured again when a model is next planned"
)


def measured_again(
    costs: Mapping[str, MeasuredCost],
    requests: Mapping[str, Request],
    clock: Clock,
    busy: bool,
) -> dict[str, MeasuredCost]:
    """The costs of operators that waited, with better times.

    Args:
        costs: what was measured first.
        requests: makes the arguments of each operator, and a thunk that runs it.
        clock: the host's clocks.
        busy: whether many operators waited; if not, those that wait again do so on an idle machine too.
    """
    found: dict[str, MeasuredCost] = {}
    alone_s: dict[str, float] = {}
    for key, cost in costs.items():
        with failures_named(key):
            watch, thunk = stopwatch(key, clock), requests[key]()
            thunk()  # initializes
            time_s = min(cost.time_s, seconds_of(thunk, watch).run_s)
            doubtful = busy and watch.spoiled
            found[key] = attrs.evolve(cost, time_s=time_s, doubtful=doubtful)
            if doubtful and runs_on_this_thread(key):
                with _one_thread():
                    thunk()
                    alone_s[key] = seconds_of(thunk, Stopwatch(clock=clock, one_thread=True)).run_s
    if any(cost.doubtful for cost in found.values()):
        warn(_BUSY)
    shares = [(one_s, found[key].time_s / one_s) for key, one_s in alone_s.items() if one_s]
    plausible = [(one_s, share) for one_s, share in shares if share <= _SLOWER]
    for key, one_s in alone_s.items():
        time_s = min(found[key].time_s, one_s * _share(one_s, plausible))
        found[key] = attrs.evolve(found[key], time_s=time_s)
    return found


def _share(alone_s: float, shares: list[tuple[float, float]]) -> float:
    """The part of its time on one thread that an operator takes on several: as others, given with theirs."""
    alike = [share for one_s, share in shares if alone_s / _ALIKE <= one_s <= alone_s * _ALIKE]
    among = alike if len(alike) >= _FEW else [share for _, share in shares]
    return min(1.0, statistics.median(among)) if among else 1.0


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
