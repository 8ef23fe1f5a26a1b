"""The referee: what a schedule peaks at and costs, step by step, or why it cannot run.

Written for clarity and for trust, not for speed: it shares no code with the evaluators inside the solvers,
and every plan is believed only through it. The memory rule: an op's outputs come live before its inputs may
go, its workspace lives while it runs, and an output takes over the storage of an input that dies right there
if the implementation says that it can.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn

import attrs

from remat_graph.errors import InvalidSchedule, shown
from remat_graph.ir import Graph, Home, Role, Value
from remat_graph.links import Links
from remat_graph.schedule import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_graph.simulator.clock import Clock


class Grads(StrEnum):
    """The state of ``.grad`` when the step begins, which decides what a delivered gradient costs."""

    NEW = "new"  # None: each delivered gradient stays
    ACCUMULATE = "accumulate"  # there already: each is added to it and freed


@attrs.frozen(kw_only=True)
class Timeline:
    """What the referee says of a valid schedule.

    Attributes:
        peak_nbytes: highest device bytes, with workspaces and the allocator's rounding.
        peak_step: the step at which that is.
        live_peak_nbytes: highest device bytes of storages alone.
        live_nbytes: per step, rounded storage bytes held after it.
        during_nbytes: per step, the highest device bytes while it runs (what `peak_nbytes` is the largest
            of).
        host_peak_nbytes: highest bytes of host copies.
        host_nbytes: per step, bytes of host copies held after it; they grow before they shrink.
        time_s: when the last lane is done; of several periods, what one takes once they follow each other.
        lane_s: busy seconds per lane, in one period.
        waited_s: seconds that computing waited for each other lane, in one period.
        recomputed_s: seconds on the compute lane spent on repeated runs, in one period.
    """

    peak_nbytes: int
    peak_step: int
    live_peak_nbytes: int
    live_nbytes: tuple[int, ...]
    during_nbytes: tuple[int, ...]
    host_peak_nbytes: int
    host_nbytes: tuple[int, ...]
    time_s: float
    lane_s: dict[Lane, float]
    waited_s: dict[Lane, float]
    recomputed_s: float


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
    replays: dict[tuple[bool, bool], _Replay] = {}
    played: list[_Replay] = []
    for number in range(passes):
        adds = grads is Grads.ACCUMULATE and (number > 0 or passes == 1)
        kind = adds, number == passes - 1
        if kind not in replays:
            replays[kind] = _Replay(graph, schedule, grads, adds=adds, updates=kind[1])
            replays[kind].run()
        played.append(replays[kind])
    clock = Clock(graph, links or Links())
    for _ in range(periods):
        for replay in played:
            for tell, what in replay.told:
                tell(clock, what)
        clock.end_period()
    readings = clock.readings()
    highest, last = max(replays.values(), key=lambda replay: replay.peak), played[-1]
    host_nbytes = max(replay.host_peak for replay in replays.values())
    if periods > 1:  # gradients that the CPU has yet to read lie there while the next forward begins
        host_nbytes = max(host_nbytes, played[0].host_peak_forward + last.unread_nbytes())
    return Timeline(
        peak_nbytes=highest.peak,
        peak_step=highest.peak_step,
        live_peak_nbytes=max(replay.live_peak for replay in replays.values()),
        live_nbytes=tuple(last.live),
        during_nbytes=tuple(last.during),
        host_peak_nbytes=host_nbytes,
        host_nbytes=tuple(last.on_host_after),
        time_s=readings.period_s,
        lane_s={lane: busy_s / periods for lane, busy_s in clock.lane_s.items()},
        waited_s=readings.waited_s,
        recomputed_s=sum(replay.recomputed_s for replay in played),
    )


class _Replay:
    """One pass over the steps; the state of every value lives here."""

    def __init__(self, graph: Graph, schedule: Schedule, grads: Grads, *, adds: bool, updates: bool) -> None:
        """Start.

        Args:
            graph: the graph.
            schedule: the steps.
            grads: what a delivered gradient is charged.
            adds: whether there are gradients to which those made here are added.
            updates: whether the optimizer steps in this pass.
        """
        self.graph, self.schedule, self.grads = graph, schedule, grads
        self.adds, self.updates = adds, updates
        self.told: list[tuple[Callable[[Clock, Any], None], Any]] = []  # what the clock is to know, in order
        self.update_of = {update.param: update for update in graph.updates}
        self.step = 0
        self.on_device: set[int] = set()
        self.on_host: set[int] = set()
        self.overwritten: set[int] = set()
        self.delivered: dict[int, Home] = {}  # gradients by where autograd got them
        self.taken_over: set[int] = set()  # its storage belongs to an output by now
        self.arriving: dict[int, set[Lane]] = {}  # started and not waited for, by value
        self.updated: set[int] = set()
        self.spent: set[int] = set()  # gradients that an update has read, or added to others
        self.stale_on_device: set[int] = set()
        self.stale_on_host: set[int] = set()
        self.ran: set[int] = set()
        self.written: set[int] = set()  # external versions made so far
        self.produced = {v for op in graph.ops for i in op.implementations for v in i.outputs}
        self.held = self.held_exact = self.host = 0
        self.peak = self.live_peak = self.host_peak = self.host_peak_forward = self.peak_step = 0
        self.recomputed_s = 0.0
        self.live: list[int] = []
        self.during: list[int] = []
        self.on_host_after: list[int] = []

    def run(self) -> None:
        steps = self.schedule.steps
        if not 0 <= self.schedule.boundary <= len(steps):
            self.fail(f"boundary {self.schedule.boundary} lies outside the {len(steps)} steps")
        end = len(steps) if self.schedule.end is None else self.schedule.end
        if not self.schedule.boundary <= end <= len(steps):
            self.fail(f"end {end} lies outside of the backward's {len(steps)} steps")
        for late in range(end, len(steps)):
            if isinstance(steps[late], Compute | Deliver):
                self.fail(f"step {late} belongs to the optimizer's call, and computes or delivers")
        for index, value in enumerate(self.graph.values):
            if value.home is Home.DEVICE:
                self.arrive(index)
            elif value.home is Home.HOST:
                self.arrive_on_host(index)
        self.note_peak(0, 0)
        for self.step, step in enumerate(steps):
            if self.step == self.schedule.boundary:
                self.begin_backward()
            before = self.held
            spike = self.carry_out(step) if self.takes_place(step) else self.held
            self.live.append(self.held)
            self.on_host_after.append(self.host)
            self.during.append(max(before, self.held, spike))
        self.step = len(steps)
        if self.schedule.boundary == len(steps):
            self.begin_backward()
        self.check_end()

    def takes_place(self, step: Step) -> bool:
        """Whether a step is done in this pass."""
        if self.updates:
            return True
        if self.schedule.end is not None and self.step >= self.schedule.end:
            return False
        match step:
            case Start(transfer) | Wait(transfer):
                return self.stored(transfer.value).role is not Role.OPTIMIZER_STATE
            case Free(value) | FreeHost(value):
                return self.stored(value).role is not Role.OPTIMIZER_STATE
            case _:
                return True

    def carry_out(self, step: Step) -> int:
        """Do one step; the device bytes at its highest moment."""
        match step:
            case Compute():
                return self.compute(step)
            case Free(value):
                self.free(value)
            case Deliver(value):
                self.deliver(value)
            case Start(transfer):
                self.start(transfer)
            case Wait(transfer):
                self.wait(transfer)
            case FreeHost(value):
                self.free_host(value)
            case OptimizerStep():
                return self.optimize(step)
            case _:
                self.fail(f"{shown(step)} is no step")
        return self.held

    # -- compute lane

    def compute(self, step: Compute) -> int:
        if not 0 <= step.op < len(self.graph.ops):
            self.fail(f"no op {step.op}: the graph has {len(self.graph.ops)}")
        op = self.graph.ops[step.op]
        if not 0 <= step.implementation < len(op.implementations):
            self.fail(f"{op.name} has no implementation {step.implementation}")
        implementation = op.implementations[step.implementation]
        again = step.op in self.ran
        if again and op.rerun is None:
            self.fail(f"{op.name} may run only once and runs again")
        if again and step.implementation != op.rerun:
            self.fail(f"{op.name} repeats implementation {step.implementation}; only {op.rerun} may repeat")
        if not again and not op.backward and self.step >= self.schedule.boundary:
            self.fail(f"forward op {op.name} runs first after the boundary")
        for value in implementation.inputs:
            self.check_readable(value, op.name)

        new: list[int] = []
        spike = spike_exact = 0
        dying: set[int] = self.freed_next() if implementation.reuses else set()
        reused_inputs: set[int] = set()
        for value in implementation.outputs:
            stored = self.graph.values[value]
            if stored.external:
                self.overwrite(value, op.name)
                continue
            source = self.reused_input(implementation.reuses, value, dying - reused_inputs) if dying else None
            if source is not None and value not in self.on_device and value not in self.delivered:
                reused_inputs.add(source)
                self.on_device.add(value)
                continue
            spike += self.graph.allocated_nbytes(value)
            spike_exact += stored.nbytes
            if value in self.on_device or value in self.delivered:
                if not stored.pinned:
                    self.fail(f"{op.name} makes {stored.name}, which is still live")
            else:
                new.append(value)
        highest = self.held + spike + implementation.workspace_nbytes
        self.note_peak(spike + implementation.workspace_nbytes, spike_exact)
        for value in new:
            self.arrive(value)
        # The bytes pass from input to output: the coming Free of the input gives nothing back.
        self.taken_over |= reused_inputs
        self.told.append((Clock.compute, implementation.time_s))
        if again:
            self.recomputed_s += implementation.time_s
        self.ran.add(step.op)
        return highest

    def freed_next(self) -> set[int]:
        """Values whose Free steps follow before anything else happens."""
        freed = set()
        steps, position = self.schedule.steps, self.step + 1
        while position < len(steps) and isinstance(step := steps[position], Free):
            freed.add(step.value)
            position += 1
        return freed

    def reused_input(self, reuses: tuple[tuple[int, int], ...], output: int, dying: set[int]) -> int | None:
        for made, source in reuses:
            if made == output and source in dying and not self.graph.values[source].external:
                return source
        return None

    def check_readable(self, value: int, reader: str) -> None:
        stored = self.graph.values[value]
        if value in self.overwritten:
            self.fail(f"{reader} reads {stored.name}, which has been overwritten since")
        if stored.external:
            if value in self.produced and value not in self.written:
                self.fail(f"{reader} reads {stored.name}, which has not been written yet")
            return
        if value in self.delivered:
            self.fail(f"{reader} reads gradient {stored.name}, which was delivered")
        if value not in self.on_device:
            self.fail(f"{reader} reads {stored.name}, which is not live")
        if self.moving(value, Lane.TO_DEVICE):
            self.fail(f"{reader} reads {stored.name}, whose transfer was not waited for")
        if value in self.updated and value not in self.stale_on_device:
            self.fail(f"{reader} reads {stored.name}, which the optimizer has already changed")

    def overwrite(self, value: int, writer: str) -> None:
        stored = self.graph.values[value]
        if value in self.written:
            self.fail(f"{writer} writes {stored.name} a second time")
        self.written.add(value)
        if stored.replaces is not None:
            if stored.replaces in self.produced and stored.replaces not in self.written:
                earlier = self.graph.values[stored.replaces].name
                self.fail(f"{writer} writes {stored.name} before {earlier}, the version it replaces")
            self.overwritten.add(stored.replaces)

    def stored(self, value: int) -> Value:
        if not 0 <= value < len(self.graph.values):
            self.fail(f"no value {value}: the graph has {len(self.graph.values)}")
        return self.graph.values[value]

    def free(self, value: int) -> None:
        stored = self.stored(value)
        if value not in self.on_device:
            self.fail(f"{stored.name} is freed but not live")
        if stored.role is Role.OUTPUT:
            self.fail(f"output {stored.name} is freed, but the caller holds it")
        if stored.role is Role.GRAD and value not in self.on_host and value not in self.spent:
            self.fail(f"gradient {stored.name} is freed before it was delivered, moved or used")
        if self.moving(value):
            self.fail(f"{stored.name} is freed while its transfer is under way")
        self.on_device.discard(value)
        self.stale_on_device.discard(value)
        if value in self.taken_over:
            self.taken_over.discard(value)
        else:
            self.held -= self.graph.allocated_nbytes(value)
            self.held_exact -= stored.nbytes

    def moving(self, value: int, lane: Lane | None = None) -> bool:
        """Whether a transfer of it is under way, on one lane or on any."""
        lanes = self.arriving.get(value)
        return lanes is not None and (lane is None or lane in lanes)

    def deliver(self, value: int) -> None:
        stored = self.stored(value)
        moved = value in self.on_host and value not in self.on_device
        if stored.role is not Role.GRAD or not (moved or value in self.on_device):
            self.fail(f"{stored.name} is delivered but is not a live gradient")
        if self.moving(value):
            self.fail(f"{stored.name} is delivered while its transfer is under way")
        self.delivered[value] = Home.HOST if moved else Home.DEVICE
        (self.on_host if moved else self.on_device).discard(value)
        if moved and self.adds:
            self.told.append((Clock.add, value))
        if self.grads is Grads.NEW:
            return  # its bytes stay
        if moved:
            self.host -= stored.nbytes
        else:
            self.held -= self.graph.allocated_nbytes(value)
            self.held_exact -= stored.nbytes

    def begin_backward(self) -> None:
        self.host_peak_forward = self.host_peak
        for value in self.graph.tangents:
            self.arrive(value)
        self.note_peak(0, 0)

    # -- transfers and the optimizer

    def start(self, transfer: Transfer) -> None:
        value, stored = transfer.value, self.stored(transfer.value)
        if self.moving(value, transfer.lane):
            self.fail(f"{stored.name} is already on its way")
        if transfer.lane is Lane.TO_HOST:
            self.check_source(value, self.on_device, "the device")
            if value not in self.on_host:
                self.arrive_on_host(value)
            elif value not in self.stale_on_host:
                self.fail(f"{stored.name} has a host copy already")
            self.keep_staleness(value, self.stale_on_device, self.stale_on_host)
        else:
            self.check_source(value, self.on_host, "the host")
            if value not in self.on_device:
                self.arrive(value)
                self.note_peak(0, 0)
            elif value not in self.stale_on_device:
                self.fail(f"{stored.name} is on the device already")
            self.keep_staleness(value, self.stale_on_host, self.stale_on_device)
        self.arriving.setdefault(value, set()).add(transfer.lane)
        self.told.append((Clock.start, transfer))

    def check_source(self, value: int, place: set[int], where: str) -> None:
        stored = self.graph.values[value]
        if value not in place or value in self.delivered:
            self.fail(f"{stored.name} is to leave {where} but is not there")
        # The host may still be receiving it: lanes order that by themselves; the device may not.
        if place is self.on_device and self.moving(value, Lane.TO_DEVICE):
            self.fail(f"{stored.name} is to leave {where} while it arrives")

    def keep_staleness(self, value: int, source: set[int], destination: set[int]) -> None:
        destination.discard(value)
        if value in source:
            destination.add(value)

    def wait(self, transfer: Transfer) -> None:
        if not self.moving(transfer.value, transfer.lane):
            self.fail(f"a wait for {self.stored(transfer.value).name}, which is not on its way")
        self.arriving[transfer.value].discard(transfer.lane)
        if not self.arriving[transfer.value]:
            del self.arriving[transfer.value]
        self.told.append((Clock.wait_for, transfer))

    def free_host(self, value: int) -> None:
        stored = self.stored(value)
        if value not in self.on_host:
            self.fail(f"{stored.name} is freed on the host but is not there")
        if self.moving(value):
            self.fail(f"{stored.name} is freed on the host while its transfer is under way")
        # The CPU optimizer may still be at work on it, and nothing else waits for that lane.
        self.told.append((Clock.wait_for_host, value))
        self.on_host.discard(value)
        self.stale_on_host.discard(value)
        self.host -= stored.nbytes

    def optimize(self, step: OptimizerStep) -> int:
        name = self.stored(step.value).name
        update = self.update_of.get(step.value)
        if update is None:
            self.fail(f"the graph has no optimizer update for {name}")
        if update.grad in self.spent:
            self.fail(f"{name} is updated twice")
        on_cpu = step.lane is Lane.CPU_OPTIMIZER
        place = self.on_host if on_cpu else self.on_device
        handed_over = self.delivered.get(update.grad) is (Home.HOST if on_cpu else Home.DEVICE)
        needed = (update.param, update.grad, *update.states) if self.updates else (update.grad,)
        for value in needed:
            if value not in place and not (value == update.grad and handed_over):
                where = "the host" if on_cpu else "the device"
                self.fail(f"the update of {name} needs {self.graph.values[value].name} on {where}")
            if not on_cpu and self.moving(value, Lane.TO_DEVICE):
                self.fail(f"the update of {name} reads {self.graph.values[value].name} while it arrives")
        self.spent.add(update.grad)
        if on_cpu and self.adds and not handed_over:
            self.told.append((Clock.add, update.grad))
        if not self.updates:
            return self.held
        changed = (update.param, *update.states)
        leaving = Lane.TO_DEVICE if on_cpu else Lane.TO_HOST
        for value in changed:
            if self.moving(value, leaving):
                self.fail(f"the update of {name} changes {self.graph.values[value].name} while it is copied")
        self.updated.update(changed)
        elsewhere, stale = (
            (self.on_device, self.stale_on_device) if on_cpu else (self.on_host, self.stale_on_host)
        )
        stale.update(value for value in changed if value in elsewhere)
        if on_cpu:
            self.told.append((Clock.update, update))
            return self.held
        self.told.append((Clock.compute, update.device_time_s))
        workspace_nbytes = update.workspace_nbytes
        self.note_peak(workspace_nbytes, 0)
        return self.held + workspace_nbytes

    # -- accounts

    def arrive(self, value: int) -> None:
        self.on_device.add(value)
        self.held += self.graph.allocated_nbytes(value)
        self.held_exact += 0 if self.graph.values[value].external else self.graph.values[value].nbytes

    def arrive_on_host(self, value: int) -> None:
        self.on_host.add(value)
        self.host += self.graph.values[value].nbytes
        self.host_peak = max(self.host_peak, self.host)

    def note_peak(self, extra: int, extra_exact: int) -> None:
        if self.held + extra > self.peak:
            self.peak, self.peak_step = self.held + extra, self.step
        self.live_peak = max(self.live_peak, self.held_exact + extra_exact)

    def check_end(self) -> None:
        for index, op in enumerate(self.graph.ops):
            if index not in self.ran:
                self.fail(f"{op.name} never runs")
        if self.arriving:
            self.fail(f"{sum(map(len, self.arriving.values()))} transfers were never waited for")
        for grad in self.graph.gradients:
            if grad not in self.delivered and grad not in self.spent:
                self.fail(f"gradient {self.graph.values[grad].name} is never delivered")
        for update in self.graph.updates:
            if update.grad not in self.spent and update.grad not in self.delivered:
                self.fail(f"{self.graph.values[update.param].name} is never updated")
        for index, value in enumerate(self.graph.values):
            if value.home is None:
                continue
            place = self.on_device if value.home is Home.DEVICE else self.on_host
            stale = self.stale_on_device if value.home is Home.DEVICE else self.stale_on_host
            if index not in place or index in stale:
                self.fail(f"{value.name} does not end up to date at home ({value.home})")

    def unread_nbytes(self) -> int:
        """Bytes of gradients that are on the host when the pass ends, for updates that go on."""
        there = {grad for grad, home in self.delivered.items() if home is Home.HOST}
        if self.grads is Grads.ACCUMULATE:
            there = set()
        there |= self.on_host.intersection(self.graph.gradients)
        return sum(self.graph.values[grad].nbytes for grad in there)

    def fail(self, problem: str) -> NoReturn:
        raise InvalidSchedule(step=self.step, problem=problem)
