"""The referee's clock: what every lane is given to do, in the order of the steps; bytes are elsewhere.

Copies and updates on the CPU run beside the computing and end in their own time. What a step of training
leaves to them goes on beside the next one, so several steps after each other tell what one takes in the long
run.
"""

from collections.abc import Iterable
from typing import NamedTuple

from remat_graph.ir import Graph, Update
from remat_graph.links import Links
from remat_graph.schedule import Lane, Transfer
from remat_graph.simulator.lanes import Job, finish_times


class Clock:
    """Notes the work on every lane and what it waits for, over one or more periods.

    Args:
        graph: the graph.
        links: bandwidths for transfers.
    """

    def __init__(self, graph: Graph, links: Links) -> None:
        self.graph, self.links = graph, links
        self.jobs: list[Job] = []
        self.lane_s = dict.fromkeys(Lane, 0.0)
        self.computing_s = 0.0  # since the last job of the compute lane
        self.waits: set[int] = set()  # what computing must wait for from here on
        self.computed: int | None = None  # that last job
        self.carried: dict[Transfer, int] = {}
        self.host_ready: dict[int, int] = {}  # per value the job that put its host copy there
        self.host_used: dict[int, int] = {}  # and the CPU optimizer's last job on it
        self.ends: list[int] = []  # the last job of the compute lane, per period

    def compute(self, duration_s: float) -> None:
        """Give the compute lane so many seconds of work."""
        self.computing_s += duration_s
        self.lane_s[Lane.COMPUTE] += duration_s

    def _add(self, lane: Lane, alone_s: float, after: set[int]) -> int:
        self.jobs.append(Job(lane, alone_s, tuple(sorted(after))))
        return len(self.jobs) - 1

    def _mark(self) -> set[int]:
        """The job that ends when everything given to the compute lane is done."""
        if self.computed is None or self.computing_s or self.waits:
            self.computed = self._add(Lane.COMPUTE, self.computing_s, self.waits)
            self.computing_s, self.waits = 0.0, set()
        return {self.computed}

    def wait_for(self, transfer: Transfer) -> None:
        """Hold the compute lane until a transfer is done."""
        self._wait(self.carried[transfer])

    def wait_for_host(self, value: int) -> None:
        """Hold the compute lane until the CPU's optimizer is done with a value."""
        self._wait(self.host_used.get(value))

    def _wait(self, job: int | None) -> None:
        if job is not None:
            if self.computing_s:
                self._mark()
            self.waits.add(job)

    def start(self, transfer: Transfer) -> None:
        """Put a transfer on its lane; it begins after what the compute lane was given until now."""
        after = self._mark()
        if transfer.lane is Lane.TO_DEVICE and transfer.value in self.host_ready:
            after = after | {self.host_ready[transfer.value]}
        alone_s = self.links.alone_s(transfer.lane, self.graph.values[transfer.value].nbytes)
        self.lane_s[transfer.lane] += alone_s
        self.carried[transfer] = self._add(transfer.lane, alone_s, after)
        if transfer.lane is Lane.TO_HOST:
            self.host_ready[transfer.value] = self.carried[transfer]

    def add(self, grad: int) -> None:
        """Let the CPU add a gradient on the host to the one that is there: three times its bytes pass."""
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
        """End one step of training; what its lanes have not done goes on beside the next."""
        (end,) = self._mark()
        self.ends.append(end)

    def readings(self) -> "Readings":
        """What one period takes: of several, the last one."""
        waited_s = dict.fromkeys(Lane, 0.0)
        if all(job.lane is Lane.COMPUTE for job in self.jobs):
            return Readings(self.lane_s[Lane.COMPUTE] / len(self.ends), waited_s)
        ends = finish_times(self.jobs, self.links)
        first = 0 if len(self.ends) == 1 else self.ends[-2] + 1
        free_s = 0.0 if first == 0 else ends[first - 1]
        for place, job in enumerate(self.jobs[first:], first):
            if job.lane is not Lane.COMPUTE:
                continue
            idle_s = ends[place] - job.alone_s - free_s
            free_s = ends[place]
            last = max(job.after, key=ends.__getitem__, default=None)
            if last is not None and idle_s > 0.0:
                waited_s[self.jobs[last].lane] += idle_s
        if len(self.ends) == 1:
            return Readings(max(ends), waited_s)
        return Readings(ends[self.ends[-1]] - ends[self.ends[-2]], waited_s)


class Readings(NamedTuple):
    """What a clock says of one period: its seconds, and those that computing waited for each other lane."""

    period_s: float
    waited_s: dict[Lane, float]
