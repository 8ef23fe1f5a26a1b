"""Write the whole training step: gradients copied to the host, states copied back, updates on the CPU.

`transfers.placement` schedules fetches and swaps. This module adds the other steps in one pass, with a clock
for the lane to the host and one for the CPU. A gradient of a parameter placed on the host is copied there as
soon as it is computed, a streamed state as soon as its update is done; the device's copy stays while the
transfer is pending and headroom allows. Updates on the CPU are queued during the backward or after it
(`optimizer_updates`). O(steps).
"""

from collections import deque

import attrs

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Grads,
    Lane,
    Links,
    OptimizerStep,
    Role,
    Schedule,
    Start,
    Step,
    Timeline,
    Transfer,
    Wait,
    simulate,
)
from remat_solvers.offload.optimizer_updates import CpuQueue, optimizer_call_steps
from remat_solvers.offload.training_problem import TrainingProblem
from remat_solvers.transfers.placement import TransferSchedule


def write_schedule(
    training: TrainingProblem, transfers: TransferSchedule, budget_nbytes: int, links: Links
) -> Schedule:
    """The schedule of a whole training step, from the transfers on `training.graph`."""
    # The least memory comes from waiting for each copy where the transfers' steps free the value. How long
    # the device's copies may stay depends on the remainder.
    schedule, timeline = transfers.schedule, transfers.timeline
    pairs = zip(timeline.during_nbytes, schedule.steps, strict=True)
    headroom = [budget_nbytes - nbytes for nbytes, step in pairs if isinstance(step, Compute)]
    whole = _ScheduleWriter(training, schedule, links, headroom).rewrite()
    if training.mode.in_backward:
        return whole
    left_nbytes = timeline.live_nbytes[-1] if schedule.steps else 0
    tail = optimizer_call_steps(training.full_graph, budget_nbytes - left_nbytes, links)
    return Schedule([*whole.steps, *tail], whole.boundary, len(whole.steps))


def simulate_accumulating(training: TrainingProblem, schedule: Schedule, links: Links) -> Timeline:
    """The referee's simulation with a ``.grad`` of every parameter, the state that needs most."""
    return simulate(training.full_graph, schedule, grads=Grads.ACCUMULATE, links=links)


@attrs.frozen
class _Copy:
    """A pending copy to the host."""

    value: int
    done_s: float
    nbytes: int


class _ScheduleWriter:
    """One pass over the steps; `headroom` holds the free bytes of each run."""

    def __init__(
        self, training: TrainingProblem, schedule: Schedule, links: Links, headroom: list[int]
    ) -> None:
        self.training, self.schedule, self.links, self.headroom = training, schedule, links, headroom
        self.graph = training.full_graph
        self.in_backward = training.mode.in_backward
        self.first_update = len(training.graph.ops) - len(training.device_updates)
        self.update_of = {update.grad: update for update in self.graph.updates}
        self.steps: list[Step] = []
        self.copies: deque[_Copy] = deque()
        self.copying_nbytes = 0
        self.clock_s = self.lane_free_s = 0.0
        self.fetched = {
            step.transfer.value: position
            for position, step in enumerate(schedule.steps)
            if isinstance(step, Wait) and step.transfer.lane is Lane.TO_DEVICE
        }
        self.due: dict[int, list[int]] = {}  # gradients whose updates come after a fetch
        self.cpu = CpuQueue(self.graph, _cpu_speed(training, schedule, links))

    def rewrite(self) -> Schedule:
        """The extended schedule."""
        runs = 0
        boundary = None
        freed: list[int] = []  # frees that follow a run directly, as storage reuse demands
        for position, step in enumerate(self.schedule.steps):
            if freed and not isinstance(step, Free):
                self.leave_device(freed, position)
                freed = []
            if position == self.schedule.boundary:
                boundary = len(self.steps)
            match step:
                case Compute(op, implementation):
                    self.make_headroom(self.headroom[runs])
                    runs += 1
                    variant = self.training.graph.ops[op].implementations[implementation]
                    self.steps += self.cpu.free_updated(self.clock_s)
                    self.steps += self.cpu.steps(self.clock_s + variant.time_s)
                    self.clock_s += variant.time_s
                    self.steps.append(self.run(step))
                case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
                    self.make_headroom(self.headroom[runs])
                    self.steps.append(step)
                case Free(value) if self.leaves(value):
                    freed.append(value)
                case _:
                    self.steps.append(step)
            for grad in self.due.pop(position, ()):
                self.queue_update(grad)
        self.leave_device(freed, len(self.schedule.steps))
        self.steps += self.cpu.steps(float("inf"))
        self.make_headroom(-1)
        return Schedule(self.steps, len(self.steps) if boundary is None else boundary)

    def run(self, step: Compute) -> Step:
        """A run, or the update that the run stands for."""
        if step.op < self.first_update:
            return step
        return OptimizerStep(self.training.device_updates[step.op - self.first_update].param, Lane.COMPUTE)

    def leaves(self, value: int) -> bool:
        """Whether the schedule must copy or deliver the value in addition to freeing it."""
        if value in self.training.host_grads:
            return True
        if value in self.training.freed_grads:
            return not (self.in_backward and value in self.update_of)
        return self.graph.values[value].role is Role.OPTIMIZER_STATE

    def leave_device(self, values: list[int], position: int) -> None:
        """Deliver or copy out values that no op on the device reads any more."""
        for value in values:
            if value in self.training.freed_grads:
                self.steps.append(Deliver(value))
                continue
            self.send(value)
            if self.in_backward and value in self.training.host_grads and value in self.update_of:
                fetched = self.fetched.get(self.update_of[value].param, -1)
                if fetched < position:
                    self.queue_update(value)
                else:
                    self.due.setdefault(fetched, []).append(value)

    def send(self, value: int) -> None:
        """Start a copy to the host."""
        nbytes = self.graph.values[value].nbytes
        self.steps.append(Start(Transfer(value, Lane.TO_HOST)))
        self.lane_free_s = max(self.clock_s, self.lane_free_s) + self.links.alone_s(Lane.TO_HOST, nbytes)
        self.copies.append(_Copy(value, self.lane_free_s, self.graph.allocated_nbytes(value)))
        self.copying_nbytes += self.copies[-1].nbytes

    def queue_update(self, grad: int) -> None:
        """Let the CPU update a parameter whose gradient is being copied."""
        self.cpu.add(self.update_of[grad], max(self.clock_s, self.lane_free_s))

    def make_headroom(self, headroom_nbytes: int) -> None:
        """Wait for copies that are done by now, and for as many more as the next run needs."""
        while self.copies and (
            self.copies[0].done_s <= self.clock_s or self.copying_nbytes > headroom_nbytes
        ):
            copy = self.copies.popleft()
            self.copying_nbytes -= copy.nbytes
            self.clock_s = max(self.clock_s, copy.done_s)
            self.steps += [Wait(Transfer(copy.value, Lane.TO_HOST)), Free(copy.value)]
            updated = self.in_backward and copy.value in self.update_of
            if copy.value in self.training.host_grads and not updated:
                self.steps.append(Deliver(copy.value))


def _cpu_speed(training: TrainingProblem, schedule: Schedule, links: Links) -> float:
    """Speed of CPU updates during the backward's copies, assumed evenly spread; 1 without copies."""
    if links.host_nbytes_per_s is None:
        return 1.0
    values, moved, passing_s = training.full_graph.values, 0, 0.0
    for position, step in enumerate(schedule.steps):
        if position < schedule.boundary:
            continue
        match step:
            case Compute(op, implementation):
                passing_s += training.graph.ops[op].implementations[implementation].time_s
            case Start(transfer):
                moved += values[transfer.value].nbytes
            case Free(value) if value in training.host_grads or values[value].role is Role.OPTIMIZER_STATE:
                moved += values[value].nbytes
            case _:
                pass
    if moved == 0:
        return 1.0
    rate = moved / passing_s if passing_s else links.host_nbytes_per_s
    return max(0.1, 1.0 - rate / links.host_nbytes_per_s)
