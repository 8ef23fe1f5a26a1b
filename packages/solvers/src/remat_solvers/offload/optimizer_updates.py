"""Schedule optimizer updates: the CPU's queue during the backward, and the optimizer's own call.

**During the backward** the CPU, whenever it is free, takes the arrived gradient whose parameter the next
forward reads first. The last layers' gradients arrive first and are needed last. So the updates that are
pending when the backward ends are spread over the model, and the next forward begins while the CPU still
works; in arrival order the forward would wait for all of them. The time windows of the updates are nested,
and for nested windows this rule is optimal except that a running update cannot be interrupted.

**In the optimizer's call** the updates on the CPU are queued first, in the order of the next forward. States
placed on the host are fetched, updated on the device and copied back, as many at a time as fit, so that both
directions are busy. O(updates * log(updates)).
"""

import heapq
from collections import deque
from collections.abc import Iterator

from remat_graph import (
    Free,
    FreeHost,
    Graph,
    Lane,
    Links,
    OptimizerStep,
    Placement,
    Start,
    Step,
    Transfer,
    Update,
    Wait,
)
from remat_solvers.offload.training_problem import first_reads, in_forward_order, streamed_states

CPU_TIME_ERROR = 0.15  # relative error of the predicted CPU time


class CpuQueue:
    """Updates on the CPU in the order in which they should run; its speed is 1 without concurrent copies."""

    def __init__(self, graph: Graph, speed: float) -> None:
        self.speed, self.first = speed, first_reads(graph)
        self.free_s = 0.0
        self.arriving: list[tuple[float, int]] = []
        self.arrived: list[tuple[int, int]] = []
        self.updates: dict[int, Update] = {}
        self.running: deque[tuple[float, int]] = deque()
        self.began_s: float | None = None
        self.longest_s = 0.0

    def add(self, update: Update, ready_s: float) -> None:
        """Queue an update that is ready from some time on."""
        self.updates[update.param] = update
        heapq.heappush(self.arriving, (ready_s, update.param))

    def steps(self, until_s: float) -> Iterator[Step]:
        """The steps to issue now so that the CPU does not fall idle before some time."""
        while self.free_s < until_s:
            while self.arriving and (self.arriving[0][0] <= self.free_s):
                _, param = heapq.heappop(self.arriving)
                heapq.heappush(self.arrived, (self.first.get(param, len(self.first)), param))
            if not self.arrived:
                if not self.arriving or self.arriving[0][0] >= until_s:
                    return
                self.free_s = self.arriving[0][0]
                continue
            _, param = heapq.heappop(self.arrived)
            update = self.updates[param]
            if self.began_s is None:
                self.began_s = self.free_s
            self.free_s += update.cpu_time_s / self.speed
            self.longest_s = max(self.longest_s, update.cpu_time_s / self.speed)
            yield OptimizerStep(param, Lane.CPU_OPTIMIZER)
            self.running.append((self.free_s, update.grad))

    def free_updated(self, now_s: float) -> Iterator[Step]:
        """Free gradients on the host whose update ended, with a margin for errors of the predicted clock.

        Compute waits at this position.
        """
        began_s = self.began_s or 0.0
        while self.running:
            done_s, grad = self.running[0]
            if done_s + self.longest_s + CPU_TIME_ERROR * (done_s - began_s) > now_s:
                return
            self.running.popleft()
            yield FreeHost(grad)


def optimizer_call_steps(graph: Graph, headroom_nbytes: int, links: Links) -> list[Step]:
    """The steps of the optimizer's call, for which the device has this much headroom."""
    updates = in_forward_order(graph, graph.updates)
    on_host = [u for u in updates if graph.values[u.param].placement is Placement.HOST]
    on_device = [u for u in updates if graph.values[u.param].placement is Placement.DEVICE]
    steps: list[Step] = [OptimizerStep(update.param, Lane.CPU_OPTIMIZER) for update in on_host]
    # States of later updates fill the headroom, but for what the update that runs needs.
    workspace_nbytes = max((u.workspace_nbytes for u in on_device), default=0)
    stream = _StateStream(graph, headroom_nbytes - workspace_nbytes, links)
    for update in sorted(on_device, key=lambda u: not streamed_states(graph, u)):
        if streamed_states(graph, update):
            stream.fetch(update)
        else:
            stream.steps.append(OptimizerStep(update.param, Lane.COMPUTE))
    stream.finish()
    return steps + stream.steps


class _StateStream:
    """States that pass through the device, with a clock for each direction."""

    def __init__(self, graph: Graph, headroom_nbytes: int, links: Links) -> None:
        self.graph, self.free_nbytes, self.links = graph, headroom_nbytes, links
        self.steps: list[Step] = []
        self.inward: deque[tuple[float, Update]] = deque()
        self.outward: deque[tuple[float, int]] = deque()
        self.now_s = self.in_free_s = self.out_free_s = 0.0

    def fetch(self, update: Update) -> None:
        """Fetch an update's states as soon as they fit."""
        states = streamed_states(self.graph, update)
        needed_nbytes = sum(self.graph.allocated_nbytes(v) for v in states)
        while self.free_nbytes < needed_nbytes and (self.inward or self.outward):
            self._end_one()
        self.free_nbytes -= needed_nbytes
        self.in_free_s = max(self.in_free_s, self.now_s)
        for value in states:
            self.in_free_s += self.links.alone_s(Lane.TO_DEVICE, self.graph.values[value].nbytes)
            self.steps.append(Start(Transfer(value, Lane.TO_DEVICE)))
        self.inward.append((self.in_free_s, update))

    def finish(self) -> None:
        """Wait for all copies."""
        while self.inward or self.outward:
            self._end_one()

    def _end_one(self) -> None:
        """Wait for the copy that ends first, in either direction."""
        if self.inward and (not self.outward or self.inward[0][0] <= self.outward[0][0]):
            done_s, update = self.inward.popleft()
            self.now_s = max(self.now_s, done_s) + update.device_time_s
            states = streamed_states(self.graph, update)
            self.steps += [Wait(Transfer(value, Lane.TO_DEVICE)) for value in states]
            self.steps.append(OptimizerStep(update.param, Lane.COMPUTE))
            self.out_free_s = max(self.out_free_s, self.now_s)
            for value in states:
                self.out_free_s += self.links.alone_s(Lane.TO_HOST, self.graph.values[value].nbytes)
                self.steps.append(Start(Transfer(value, Lane.TO_HOST)))
                self.outward.append((self.out_free_s, value))
        else:
            done_s, value = self.outward.popleft()
            self.now_s = max(self.now_s, done_s)
            self.steps += [Wait(Transfer(value, Lane.TO_HOST)), Free(value)]
            self.free_nbytes += self.graph.allocated_nbytes(value)
