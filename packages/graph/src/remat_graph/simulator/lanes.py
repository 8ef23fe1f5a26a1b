"""Compute when the jobs of concurrent lanes end: copies, the CPU optimizer, the compute lane of the device.

Each lane runs its jobs in order. A job begins when the jobs that it waits for are done. Its speed depends on
the other busy lanes: two directions share a link, and all lanes share the host memory. So the end of a job
depends on jobs that begin after it, and the jobs are played event by event.
"""

from collections import deque
from collections.abc import Sequence

import attrs

from remat_graph.links import Links
from remat_graph.schedule import Lane


@attrs.frozen
class LaneJob:
    """Work on a lane."""

    lane: Lane  # the lane
    alone_s: float  # seconds of the job while no other lane is busy
    after: tuple[int, ...] = ()  # indices of earlier jobs that must be done before this one begins


def finish_times(jobs: Sequence[LaneJob], links: Links) -> list[float]:
    """When each job ends, in seconds from the beginning of the first; O(jobs)."""
    done_s = [0.0] * len(jobs)
    queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
    missing = [len(job.after) for job in jobs]  # per job, how many of `after` are not done
    waiting: list[list[int]] = [[] for _ in jobs]
    for number, job in enumerate(jobs):
        queues[job.lane].append(number)
        for earlier in job.after:
            waiting[earlier].append(number)
    left = [job.alone_s for job in jobs]
    speeds_of: dict[tuple[Lane, ...], dict[Lane, float]] = {}
    running: dict[Lane, int] = {}
    now_s = 0.0
    while True:
        ended = True
        while ended:  # a job of 0 seconds ends where it begins, which may let others begin
            ended = False
            for lane, queue in queues.items():
                while queue and lane not in running and not missing[queue[0]]:
                    number = queue.popleft()
                    if left[number] > 0.0:
                        running[lane] = number
                        break
                    done_s[number] = now_s
                    ended = True
                    for later in waiting[number]:
                        missing[later] -= 1
        if not running:
            return done_s
        busy = tuple(running)
        if busy not in speeds_of:
            speeds_of[busy] = links.speeds(frozenset(busy))
        speeds = speeds_of[busy]
        elapsed_s, next_lane = min((left[number] / speeds[lane], lane) for lane, number in running.items())
        now_s += elapsed_s
        for lane, number in running.items():
            left[number] = max(0.0, left[number] - elapsed_s * speeds[lane])
        # The job that ends is chosen by its lane: `left` may keep a rounding error above 0.
        ended_job = running.pop(next_lane)
        done_s[ended_job] = now_s
        for later in waiting[ended_job]:
            missing[later] -= 1
