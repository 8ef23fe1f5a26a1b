"""Simulate a schedule step by step: its peak bytes, its time, or why it cannot run. This is the referee.

The code is written for clarity, not for speed. It shares nothing with the evaluators inside the solvers, and
every plan is checked by it. The memory rule: the outputs of an op become live before its inputs may be freed,
its workspace is held while it runs, and an output takes over the storage of an input that is freed directly
after the op, if the implementation allows that (`Implementation.reuses`).
"""

from remat_graph.ir import Graph
from remat_graph.links import Links
from remat_graph.schedule import Schedule
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
    """Simulate a schedule.

    A training step may have several passes, a forward and a backward for each micro-batch. The optimizer
    steps only in the last one: the other passes leave out the steps after `Schedule.end`, optimizer states
    are not moved, and an `OptimizerStep` within the backward only accumulates the gradient.

    Args:
        graph: the graph.
        schedule: the steps.
        grads: the state of ``.grad``; the peak of NEW, the default, is never below that of ACCUMULATE.
        links: bandwidths for transfers.
        periods: number of consecutive training steps. Pending work of the lanes, such as an update on the
            CPU, continues during the next step, which waits for it where it needs the result.
        passes: number of forwards and backwards for one step of the optimizer. The first of several finds
            no ``.grad`` to add to; the bytes of all of them are counted by `grads`.

    Raises:
        InvalidSchedule: a step cannot run; the message names the step and what was missing.
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
            for call, argument in replay.events:
                call(clock, argument)
        clock.end_period()
    readings = clock.readings()
    highest, last = max(replays.values(), key=lambda replay: replay.memory.peak_nbytes), played[-1]
    host_nbytes = max(replay.memory.host_peak_nbytes for replay in replays.values())
    if periods > 1:  # the CPU may still read gradients while the next forward runs
        host_nbytes = max(host_nbytes, played[0].memory.host_peak_forward_nbytes + last.unread_nbytes())
    return Timeline(
        peak_nbytes=highest.memory.peak_nbytes,
        peak_step=highest.memory.peak_step,
        live_peak_nbytes=max(replay.memory.live_peak_nbytes for replay in replays.values()),
        live_nbytes=tuple(last.memory.live_nbytes),
        during_nbytes=tuple(last.memory.during_nbytes),
        host_peak_nbytes=host_nbytes,
        host_nbytes=tuple(last.memory.host_after_nbytes),
        time_s=readings.period_s,
        lane_s={lane: busy_s / periods for lane, busy_s in clock.lane_s.items()},
        waited_s=readings.waited_s,
        starting_s=clock.starting_s / periods,
        recomputed_s=sum(replay.recomputed_s for replay in played),
        issue_s=sum(replay.issue_s for replay in played),
    )
