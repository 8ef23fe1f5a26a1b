"""Measure operators again that waited for a core, because other processes kept the cores busy.

Those are operators on several threads: on one thread, the time leaves the wait out. They may be spoiled each
time, since when a thread has no core, the others wait for it, and 20 us become 20 ms. The second measurement
is later than the first, and the shorter of the two counts. If the two disagree, or are milliseconds longer
than on one thread by that thread's own clock, the time is not to be trusted: the time on one thread, with the
median speedup of trusted operators of about that length, counts if it is shorter. That several threads need
longer is no proof: on two cores, small convolutions took up to five times as long as on one.

All that waited twice are doubtful, if many operators waited; of a few, which may wait on an idle machine too,
only those that are milliseconds longer than on one thread. ``measure`` replaces the times of doubtful ones
when the cores are idle.
"""

import statistics
from collections.abc import Generator, Mapping

import attrs
import torch

from remat_executor.costs.cache import MeasuredCost
from remat_executor.costs.failures import failures_named
from remat_executor.costs.stopwatch import (
    HostClocks,
    HostStopwatch,
    Request,
    runs_on_this_thread,
    seconds_of,
    stopwatch,
)
from remat_graph.contexts import context

_AGREE = 1.15  # two measurements within this factor
_SLICE_S = 1e-3  # a thread that has to wait for a core waits longer than this
_ALIKE = 2.0  # lengths within this factor
_FEW = 3  # operators to take a speedup from


def measured_again(
    costs: Mapping[str, MeasuredCost],
    requests: Mapping[str, Request],
    clock: HostClocks,
    busy: bool,
) -> dict[str, MeasuredCost]:
    """The costs of operators that waited, with better times.

    Args:
        costs: what was measured first.
        requests: makes the arguments of each operator, and a thunk that runs it.
        clock: the host's clocks.
        busy: whether many operators waited; if not, those that wait again may do so on an idle machine too.
    """
    found: dict[str, MeasuredCost] = {}
    unsure: dict[str, float] = {}  # with the seconds on one thread
    shares: list[tuple[float, float]] = []  # seconds on one thread, and the part of them on several
    for key, cost in costs.items():
        with failures_named(key):
            watch, thunk = stopwatch(key, clock), requests[key]()
            thunk()  # initializes
            again_s = seconds_of(thunk, watch).run_s
            time_s = min(cost.time_s, again_s)
            found[key] = attrs.evolve(cost, time_s=time_s, doubtful=busy and watch.spoiled)
            if not watch.spoiled or not runs_on_this_thread(key):
                continue
            with _one_thread():
                thunk()
                alone_s = seconds_of(thunk, HostStopwatch(clock=clock, one_thread=True)).run_s
        too_long = time_s >= alone_s + _SLICE_S
        if too_long or (busy and max(cost.time_s, again_s) > _AGREE * time_s):
            unsure[key] = alone_s
        elif busy:
            shares.append((alone_s, time_s / max(alone_s, 1e-9)))
    for key, alone_s in unsure.items():
        time_s = min(found[key].time_s, alone_s * _share(alone_s, shares))
        found[key] = attrs.evolve(found[key], time_s=time_s, doubtful=True)
    return found


def _share(alone_s: float, shares: list[tuple[float, float]]) -> float:
    """The part of its time on one thread that an operator takes on several: as others, given with theirs."""
    alike = [share for one_s, share in shares if alone_s / _ALIKE <= one_s <= alone_s * _ALIKE]
    among = alike if len(alike) >= _FEW else [share for _, share in shares]
    return statistics.median(among) if among else 1.0


@context
def _one_thread() -> Generator[None, None, None]:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
