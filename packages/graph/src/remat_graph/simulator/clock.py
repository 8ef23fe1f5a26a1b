"""Time the lanes of a schedule: queue the work of every lane in the order of the steps, then play it.

Copies and updates on the CPU run concurrently with the compute lane. Work that a training step leaves to them
continues during the next step, so several consecutive steps show the time of one in the long run.
"""

from collections.abc import Iterable
from typing import NamedTuple

from remat_graph.ir import Graph, Update
from remat_graph.links import Links
from remat_graph.schedule import Lane, Transfer
from remat_graph.simulator.lanes import LaneJob, finish_times


class Clock:
    """Record the work of every lane and its dependencies, over one or more periods."""

    def __init__(self, graph: Graph, links: Links) -> None:
        self.graph, self.links = graph, links
        self.jobs: list[LaneJob] = []
        self.lane_s = dict.fromkeys(Lane, 0.0)
        self.computing_s = 0.0  # since the last job of the compute lane
        self.starting_s = 0.0  # of the host, in which the compute lane waits for it
        self.waits: set[int] = set()  # jobs that end before the compute lane continues
        self.computed: int | None = None  # the last job of the compute lane
        self.job_of: dict[Transfer, int] = {}
        self.host_ready: dict[int, int] = {}  # per value the job that made its host copy
        self.host_used: dict[int, int] = {}  # per value the last job of the CPU optimizer that uses it
        self.ends: list[int] = []  # the last job of the compute lane, per period

    def compute(self, duration_s: float) -> None:
        """Queue seconds of work on the compute lane."""
        self.computing_s += duration_s
        self.lane_s[Lane.COMPUTE] += duration_s

    def _add(self, lane: Lane, alone_s: float, after: set[int]) -> int:
        self.jobs.append(LaneJob(lane, alone_s, tuple(sorted(after))))
        return len(self.jobs) - 1

    def _mark(self) -> set[int]:
        """The job that ends when all work queued on the compute lane is done."""
        if self.computed is None or self.computing_s or self.waits:
            self.computed = self._add(Lane.COMPUTE, self.computing_s, self.waits)
            self.computing_s, self.waits = 0.0, set()
        return {self.computed}

    def wait_for(self, transfer: Transfer) -> None:
        """Block the compute lane until a transfer is done."""
        self._wait(self.job_of[transfer])

    def wait_for_host(self, value: int) -> None:
        """Block the compute lane until the CPU optimizer is done with a value."""
        self._wait(self.host_used.get(value))

    def _wait(self, job: int | None) -> None:
        if job is not None:
            if self.computing_s:
                self._mark()
            self.waits.add(job)

    def issue(self, transfer: Transfer) -> None:
        """Let the compute lane wait until the host has started a transfer."""
        self.computing_s += self.links.start_s
        self.starting_s += self.links.start_s

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer; it begins after the work queued on the compute lane so far."""
        after = self._mark()
        if transfer.lane is Lane.TO_DEVICE and transfer.value in self.host_ready:
            after = after | {self.host_ready[transfer.value]}
        alone_s = self.links.alone_s(transfer.lane, self.graph.values[transfer.value].nbytes)
        self.lane_s[transfer.lane] += alone_s
        self.job_of[transfer] = self._add(transfer.lane, alone_s, after)
        if transfer.lane is Lane.TO_HOST:
            self.host_ready[transfer.value] = self.job_of[transfer]

    def add(self, grad: int) -> None:
        """Add a gradient on the host to the accumulated one: the CPU moves three times its bytes."""
        rate = self.links.host_nbytes_per_s
        if rate is not None:
            self._on_cpu(3 * self.graph.values[grad].nbytes / rate, {self.host_ready[grad]}, (grad,), (grad,))

    def update(self, update: Update) -> None:
        """Update a parameter on the CPU."""
        changed = (update.param, *update.states)
        after = {self.host_ready[v] for v in (update.grad, *changed) if v in self.host_ready}
        self._on_cpu(update.cpu_time_s, after, changed, (update.grad, *changed))

    def _on_cpu(self, alone_s: float, after: set[int], makes: Iterable[int], uses: Iterable[int]) -> None:
        self.lane_s[Lane.CPU_OPTIMIZER] += alone_s
        job = self._add(Lane.CPU_OPTIMIZER, alone_s, self._mark() | after)
        self.host_ready.update(dict.fromkeys(makes, job))
        self.host_used.update(dict.fromkeys(uses, job))

    def end_period(self) -> None:
        """End one training step; pending work of its lanes continues during the next one."""
        (end,) = self._mark()
        self.ends.append(end)

    def readings(self) -> "Readings":
        """Seconds of one period: of the last one, if there are several."""
        waited_s = dict.fromkeys(Lane, 0.0)
        if all(job.lane is Lane.COMPUTE for job in self.jobs):
            return Readings(self.lane_s[Lane.COMPUTE] / len(self.ends), waited_s)
        ends = finish_times(self.jobs, self.links)
        first = 0 if len(self.ends) == 1 else self.ends[-2] + 1
        free_s = 0.0 if first == 0 else ends[first - 1]
        for number, job in enumerate(self.jobs[first:], first):
            if job.lane is not Lane.COMPUTE:
                continue
            idle_s = ends[number] - job.alone_s - free_s
            free_s = ends[number]
            last = max(job.after, key=ends.__getitem__, default=None)
            if last is not None and idle_s > 0.0:
                waited_s[self.jobs[last].lane] += idle_s
        if len(self.ends) == 1:
            return Readings(max(ends), waited_s)
        return Readings(ends[self.ends[-1]] - ends[self.ends[-2]], waited_s)


class Readings(NamedTuple):
    """Seconds of one period, and seconds that the compute lane waited for each other lane."""

    period_s: float
    waited_s: dict[Lane, float]
