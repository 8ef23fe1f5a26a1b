"""Seconds of work on lanes that run beside each other: copies, the CPU's optimizer, the device's computing.

Each lane does its jobs in order. A job begins when those that it waits for are done, and goes at the speed
that the lanes beside it leave: two directions share a link, and all of them the host's memory. So when a job
ends depends on what begins after it, and the whole is played through, from one end of a job to the next.
"""

from collections import deque
from collections.abc import Sequence

import attrs

from remat_graph.links import Links
from remat_graph.schedule import Lane


@attrs.frozen
class Job:
    """Work on a lane.

    Attributes:
        lane: where.
        alone_s: seconds it takes with nothing beside it.
        after: jobs, by their place in the list, that must be done before it begins; all of them come earlier.
    """

    lane: Lane
    alone_s: float
    after: tuple[int, ...] = ()


def finish_times(jobs: Sequence[Job], links: Links) -> list[float]:
    """When each job ends, in seconds from the beginning; O(jobs)."""
    done_s = [0.0] * len(jobs)
    queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
    missing = [len(job.after) for job in jobs]  # jobs that must still be done before this one begins
    waiting: list[list[int]] = [[] for _ in jobs]
    for place, job in enumerate(jobs):
        queues[job.lane].append(place)
        for earlier in job.after:
            waiting[earlier].append(place)
    left = [job.alone_s for job in jobs]
    speeds_of: dict[tuple[Lane, ...], dict[Lane, float]] = {}
    running: dict[Lane, int] = {}
    now_s = 0.0
    while True:
        ended = True
        while ended:  # what takes no time at all ends where it begins, and may let others begin
            ended = False
            for lane, queue in queues.items():
                while queue and lane not in running and not missing[queue[0]]:
                    place = queue.popleft()
                    if left[place] > 0.0:
                        running[lane] = place
                        break
                    done_s[place] = now_s
                    ended = True
                    for later in waiting[place]:
                        missing[later] -= 1
        if not running:
            return done_s
        busy = tuple(running)
        if busy not in speeds_of:
            speeds_of[busy] = links.speeds(frozenset(busy))
        speeds = speeds_of[busy]
        passing_s, next_lane = min((left[place] / speeds[lane], lane) for lane, place in running.items())
        now_s += passing_s
        for lane, place in running.items():
            left[place] = max(0.0, left[place] - passing_s * speeds[lane])
        # The one that ends is told apart by name: a rest of rounding would keep it alive.
        ended_job = running.pop(next_lane)
        done_s[ended_job] = now_s
        for later in waiting[ended_job]:
            missing[later] -= 1
