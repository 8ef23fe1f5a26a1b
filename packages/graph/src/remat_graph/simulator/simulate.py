"""The referee: what a schedule peaks at and costs, step by step, or why it cannot run.

Written for clarity and for trust, not for speed: it shares no code with the evaluators inside the solvers,
and every plan is believed only through it. The memory rule: an op's outputs come live before its inputs may
go, its workspace lives while it runs, and an output takes over the storage of an input that dies right there
if the implementation says that it can.
"""

from remat_graph.ir import Graph
from remat_graph.links import Links
from remat_graph.schedule import (
    Schedule,
)
from remat_graph.simulator.clock import Clock
from remat_graph.simulator.replay import Replay
from remat_graph.simulator.timeline import Grads, Timeline


def simulate(
    graph: Graph,
    schedule: Schedule,
    *,
    grads: Grads = Grads.NEW,
    links: Links | None = None,
    periods: int = 1,
    passes: int = 1,
) -> Timeline:
    """Replay a schedule.

    A step of training may have several passes, a forward and a backward for each micro-batch. Only in the
    last one the optimizer steps: in the others what follows `Schedule.end` is left out, optimizer states stay
    where they are, and an `OptimizerStep` within the backward adds the gradient to the others and no more.

    Args:
        graph: the graph.
        schedule: the steps.
        grads: the state of ``.grad``; NEW, the default, is never below ACCUMULATE.
        links: bandwidths for transfers.
        periods: how many steps of training follow each other. What a step leaves to the lanes, an update on
            the CPU say, goes on beside the next one, which waits for it where it needs it.
        passes: forwards and backwards to one step of the optimizer. Of several, the first finds no ``.grad``
            to add to; `grads` is what they are charged by.

    Raises:
        InvalidSchedule: with the step and what was missing.
    """
    grads = Grads(grads)
    replays: dict[tuple[bool, bool], Replay] = {}
    played: list[Replay] = []
    for number in range(passes):
        adds = grads is Grads.ACCUMULATE and (number > 0 or passes == 1)
        kind = adds, number == passes - 1
        if kind not in replays:
            replays[kind] = Replay(graph, schedule, grads, adds=adds, updates=kind[1])
            replays[kind].run()
        played.append(replays[kind])
    clock = Clock(graph, links or Links())
    for _ in range(periods):
        for replay in played:
            for emit, what in replay.events:
                emit(clock, what)
        clock.end_period()
    readings = clock.readings()
    highest, last = max(replays.values(), key=lambda replay: replay.memory.peak), played[-1]
    host_nbytes = max(replay.memory.host_peak for replay in replays.values())
    if periods > 1:  # gradients that the CPU has yet to read lie there while the next forward begins
        host_nbytes = max(host_nbytes, played[0].memory.host_peak_forward + last.unread_nbytes())
    return Timeline(
        peak_nbytes=highest.memory.peak,
        peak_step=highest.memory.peak_step,
        live_peak_nbytes=max(replay.memory.live_peak for replay in replays.values()),
        live_nbytes=tuple(last.memory.live),
        during_nbytes=tuple(last.memory.during),
        host_peak_nbytes=host_nbytes,
        host_nbytes=tuple(last.memory.on_host_after),
        time_s=readings.period_s,
        lane_s={lane: busy_s / periods for lane, busy_s in clock.lane_s.items()},
        waited_s=readings.waited_s,
        recomputed_s=sum(replay.recomputed_s for replay in played),
    )
