"""Lay the work of a schedule out in time: when each step works on its lane, by the clock of the referee."""

import attrs

from remat_graph.ir import Graph
from remat_graph.links import Links
from remat_graph.schedule import Lane, Schedule, Step
from remat_graph.simulator.clock import Clock
from remat_graph.simulator.lanes import finish_times
from remat_graph.simulator.replay import Replay
from remat_graph.simulator.timeline import Grads


@attrs.frozen
class LaneRun:
    """The work of one step on one lane.

    Attributes:
        step: index of the step.
        lane: the lane.
        begin_s: seconds from the beginning of the schedule.
        end_s: the same.
    """

    step: int
    lane: Lane
    begin_s: float
    end_s: float


def lane_runs(
    graph: Graph, schedule: Schedule, *, grads: Grads = Grads.NEW, links: Links | None = None
) -> tuple[LaneRun, ...]:
    """The work of one training step, in the order of the steps; the last end is `Timeline.time_s`.

    Args:
        graph: the graph.
        schedule: the steps.
        grads: the state of ``.grad``.
        links: bandwidths for transfers.

    Raises:
        InvalidSchedule: the schedule is invalid.
    """
    links = links or Links()
    replay = _NotedReplay(graph, schedule, grads, adds=grads is Grads.ACCUMULATE, updates=True)
    replay.run()
    clock = Clock(graph, links)
    work: list[tuple[int, list[tuple[int, float]]]] = []  # jobs, each with the steps that it does
    computing: list[tuple[int, float]] = []  # steps of the next job of the compute lane, and their seconds

    def note(step: int, first: int) -> None:
        for job in range(first, len(clock.jobs)):
            if clock.jobs[job].lane is Lane.COMPUTE:
                work.append((job, list(computing)))
                computing.clear()
            else:
                work.append((job, [(step, 0.0)]))

    for (call, argument), step in zip(replay.events, replay.event_steps, strict=True):
        first = len(clock.jobs)
        call(clock, argument)
        note(step, first)
        if call is Clock.compute:
            computing.append((step, argument))
    first = len(clock.jobs)
    clock.end_period()
    note(len(schedule.steps), first)
    runs = _in_time(clock, links, work)
    end_s = max((run.end_s for run in runs if run.lane is Lane.COMPUTE), default=0.0)
    runs += [LaneRun(step, Lane.COMPUTE, end_s, end_s) for step, _ in computing]  # of 0 seconds
    return tuple(sorted(runs, key=lambda run: run.step))


class _NotedReplay(Replay):
    """A replay that knows the step of each call for the clock."""

    def run(self) -> None:
        self.event_steps: list[int] = []
        super().run()

    def _carry_out(self, step: Step) -> int:
        highest_nbytes = super()._carry_out(step)
        self.event_steps += [self.step] * (len(self.events) - len(self.event_steps))
        return highest_nbytes


def _in_time(clock: Clock, links: Links, work: list[tuple[int, list[tuple[int, float]]]]) -> list[LaneRun]:
    """Begin and end of each step; a job begins when its lane is free and what it waits for is done."""
    ends = finish_times(clock.jobs, links)
    free_s = dict.fromkeys(Lane, 0.0)
    runs: list[LaneRun] = []
    for number, steps in work:
        job = clock.jobs[number]
        begin_s = max([free_s[job.lane], *(ends[earlier] for earlier in job.after)])
        free_s[job.lane] = ends[number]
        if job.lane is not Lane.COMPUTE:
            runs += [LaneRun(step, job.lane, begin_s, ends[number]) for step, _ in steps]
            continue
        for step, seconds in steps:
            end_s = min(ends[number], begin_s + seconds)  # sums of floats may differ in the last digit
            runs.append(LaneRun(step, job.lane, begin_s, end_s))
            begin_s = end_s
    return runs
