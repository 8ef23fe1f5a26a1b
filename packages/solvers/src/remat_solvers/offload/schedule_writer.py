"""From a placed schedule to a step of training: gradients that leave, states that return, updates on the CPU.

`transfers.place` knows copies in and activations out. Here the rest is written, in one pass with a clock
for the lane to the host and one for the CPU. A gradient of a parameter placed on the host is copied there as
soon as it is made, a streamed state as soon as its update is done; the device's copy stays while that is
under way as long as there is room. Updates on the CPU are queued within the backward or behind it
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
from remat_solvers.offload.optimizer_updates import CpuQueue, optimizers_call
from remat_solvers.offload.training_problem import Stepping
from remat_solvers.transfers.placement import Placed


def hand_over(stepping: Stepping, placed: Placed, budget_nbytes: int, links: Links) -> Schedule:
    """The schedule of a whole step of training.

    Args:
        stepping: the step.
        placed: the steps on `stepping.graph`.
        budget_nbytes: how much there may be on the device.
        links: bandwidths.
    """
    # What is handed over leaves where the placed steps free it, if its copy is waited for on the spot: what
    # they need is what can be had least, and how long the device's copies may stay depends on the rest.
    schedule, timeline = placed.schedule, placed.timeline
    pairs = zip(timeline.during_nbytes, schedule.steps, strict=True)
    room = [budget_nbytes - nbytes for nbytes, step in pairs if isinstance(step, Compute)]
    whole = _Rewriter(stepping, schedule, links, room).rewrite()
    if stepping.style.in_backward:
        return whole
    left_nbytes = timeline.live_nbytes[-1] if schedule.steps else 0
    tail = optimizers_call(stepping.whole, budget_nbytes - left_nbytes, links)
    return Schedule([*whole.steps, *tail], whole.boundary, len(whole.steps))


def judged(stepping: Stepping, schedule: Schedule, links: Links, periods: int = 1) -> Timeline:
    """What the referee says in the state of ``.grad`` that needs most."""
    return simulate(
        stepping.whole,
        schedule,
        grads=Grads.ACCUMULATE if stepping.style.adds else Grads.NEW,
        links=links,
        periods=periods,
        passes=stepping.style.micro_batches if periods > 1 else 1,
    )


@attrs.frozen
class _Copy:
    """A value on its way to the host."""

    value: int
    done_s: float
    nbytes: int


class _Rewriter:
    """One pass over the steps."""

    def __init__(self, stepping: Stepping, schedule: Schedule, links: Links, room: list[int]) -> None:
        """Start.

        Args:
            stepping: the step.
            schedule: what is rewritten.
            links: bandwidths.
            room: per run, bytes that are free beside it.
        """
        self.stepping, self.schedule, self.links, self.room = stepping, schedule, links, room
        self.graph = stepping.whole
        self.in_backward = stepping.style.in_backward
        self.first_update = len(stepping.graph.ops) - len(stepping.stepped)
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
        self.due: dict[int, list[int]] = {}  # gradients whose updates must come after a fetch
        self.cpu = CpuQueue(self.graph, _cpu_speed(stepping, schedule, links))

    def rewrite(self) -> Schedule:
        """Walk."""
        runs = 0
        boundary = None
        going: list[int] = []  # behind a run: reuse needs its frees next to it
        for position, step in enumerate(self.schedule.steps):
            if going and not isinstance(step, Free):
                self.let_go(going, position)
                going = []
            if position == self.schedule.boundary:
                boundary = len(self.steps)
            match step:
                case Compute(op, implementation):
                    self.make_room(self.room[runs])
                    runs += 1
                    way = self.stepping.graph.ops[op].implementations[implementation]
                    self.steps += self.cpu.drop(self.clock_s)
                    self.steps += self.cpu.steps(self.clock_s + way.time_s)
                    self.clock_s += way.time_s
                    self.steps.append(self.run(step))
                case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
                    self.make_room(self.room[runs])
                    self.steps.append(step)
                case Free(value) if self.leaves(value):
                    going.append(value)
                case _:
                    self.steps.append(step)
            for grad in self.due.pop(position, ()):
                self.offer(grad)
        self.let_go(going, len(self.schedule.steps))
        self.steps += self.cpu.steps(float("inf"))
        self.make_room(-1)
        return Schedule(self.steps, len(self.steps) if boundary is None else boundary)

    def run(self, step: Compute) -> Step:
        """A run, or the update that it stands for."""
        if step.op < self.first_update:
            return step
        return OptimizerStep(self.stepping.stepped[step.op - self.first_update].param, Lane.COMPUTE)

    def leaves(self, value: int) -> bool:
        """Whether more happens to a value than that its bytes on the device go."""
        if value in self.stepping.leaving:
            return True
        if value in self.stepping.going:
            return not (self.in_backward and value in self.update_of)
        return self.graph.values[value].role is Role.OPTIMIZER_STATE

    def let_go(self, values: list[int], position: int) -> None:
        """Nothing on the device reads these any more."""
        for value in values:
            if value in self.stepping.going:
                self.steps.append(Deliver(value))
                continue
            self.send(value)
            if self.in_backward and value in self.stepping.leaving and value in self.update_of:
                fetched = self.fetched.get(self.update_of[value].param, -1)
                if fetched < position:
                    self.offer(value)
                else:
                    self.due.setdefault(fetched, []).append(value)

    def send(self, value: int) -> None:
        """Start a copy to the host."""
        nbytes = self.graph.values[value].nbytes
        self.steps.append(Start(Transfer(value, Lane.TO_HOST)))
        self.lane_free_s = max(self.clock_s, self.lane_free_s) + self.links.alone_s(Lane.TO_HOST, nbytes)
        self.copies.append(_Copy(value, self.lane_free_s, self.graph.allocated_nbytes(value)))
        self.copying_nbytes += self.copies[-1].nbytes

    def offer(self, grad: int) -> None:
        """Let the CPU update a parameter whose gradient is on its way."""
        self.cpu.offer(self.update_of[grad], max(self.clock_s, self.lane_free_s))

    def make_room(self, room_nbytes: int) -> None:
        """Wait for copies that are done by now, and for as many more as the next run needs gone."""
        while self.copies and (self.copies[0].done_s <= self.clock_s or self.copying_nbytes > room_nbytes):
            copy = self.copies.popleft()
            self.copying_nbytes -= copy.nbytes
            self.clock_s = max(self.clock_s, copy.done_s)
            self.steps += [Wait(Transfer(copy.value, Lane.TO_HOST)), Free(copy.value)]
            updated = self.in_backward and copy.value in self.update_of
            if copy.value in self.stepping.leaving and not updated:
                self.steps.append(Deliver(copy.value))


def _cpu_speed(stepping: Stepping, schedule: Schedule, links: Links) -> float:
    """How fast the CPU updates beside the backward's copies, taken as evenly spread; 1 is as alone."""
    if links.host_nbytes_per_s is None:
        return 1.0
    values, moved, passing_s = stepping.whole.values, 0, 0.0
    for position, step in enumerate(schedule.steps):
        if position < schedule.boundary:
            continue
        match step:
            case Compute(op, implementation):
                passing_s += stepping.graph.ops[op].implementations[implementation].time_s
            case Start(transfer):
                moved += values[transfer.value].nbytes
            case Free(value) if value in stepping.leaving or values[value].role is Role.OPTIMIZER_STATE:
                moved += values[value].nbytes
            case _:
                pass
    if moved == 0:
        return 1.0
    rate = moved / passing_s if passing_s else links.host_nbytes_per_s
    return max(0.1, 1.0 - rate / links.host_nbytes_per_s)
