"""Carry out the steps of a schedule one by one, and refuse a step that cannot run."""

from collections.abc import Callable
from typing import Any, NoReturn

from remat_graph.errors import InvalidSchedule, shown
from remat_graph.ir import Graph, Op, Placement, Role, Value
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
from remat_graph.simulator.memory_rule import Memory
from remat_graph.simulator.timeline import Grads


class Replay:
    """One pass over the steps, with the state of every value.

    Attributes:
        memory: bytes held and their peaks.
        events: calls for the clock in order: its methods, each with its argument.
        recomputed_s: seconds on the compute lane spent on repeated runs.
        issue_s: seconds in which the host issues all runs.
    """

    def __init__(self, graph: Graph, schedule: Schedule, grads: Grads, *, adds: bool, updates: bool) -> None:
        self.graph, self.schedule, self.grads = graph, schedule, grads
        self.adds = adds  # whether the gradients are added to accumulated ones
        self.updates = updates  # whether the optimizer steps in this pass
        self.events: list[tuple[Callable[[Clock, Any], None], Any]] = []
        self.update_of = {update.param: update for update in graph.updates}
        self.step = 0
        self.memory = Memory(graph)
        self.overwritten: set[int] = set()
        self.delivered: dict[int, Placement] = {}  # where each gradient was delivered
        self.pending: dict[int, set[Lane]] = {}  # per value, its transfers that no step has waited for
        self.updated: set[int] = set()
        self.spent: set[int] = set()  # gradients that an update has read or accumulated
        self.stale_on_device: set[int] = set()
        self.stale_on_host: set[int] = set()
        self.ran: dict[int, int | None] = {}  # per op that has run, the implementation that repeats it
        self.switched: dict[str, bool] = {}  # per switch, how the first op that it concerns has run
        self.written: set[int] = set()  # external versions made so far
        self.last_run = -1  # the step that computed last
        self.freed: dict[int, int] = {}  # outputs that the caller drops: the step that freed each last
        self.produced = {v for op in graph.ops for i in op.implementations for v in i.outputs}
        self.recomputed_s = 0.0
        self.issue_s = 0.0

    def run(self) -> None:
        """Carry out all steps.

        Raises:
            InvalidSchedule: a step cannot run; the message names the step and what was missing.
        """
        steps = self.schedule.steps
        if not 0 <= self.schedule.boundary <= len(steps):
            self._fail(f"boundary {self.schedule.boundary} lies outside the {len(steps)} steps")
        end = len(steps) if self.schedule.end is None else self.schedule.end
        if not self.schedule.boundary <= end <= len(steps):
            self._fail(f"end {end} lies outside the backward's {len(steps)} steps")
        for late in range(end, len(steps)):
            if isinstance(steps[late], Compute | Deliver):
                self._fail(f"step {late} computes or delivers, but runs in the optimizer's call")
        for index, value in enumerate(self.graph.values):
            if value.placement is Placement.DEVICE:
                self.memory.allocate(index)
            elif value.placement is Placement.HOST:
                self.memory.allocate_on_host(index)
        self.memory.note_peak(self.step)
        for self.step, step in enumerate(steps):
            if self.step == self.schedule.boundary:
                self._begin_backward()
            before_nbytes = self.memory.held_nbytes
            highest_nbytes = self._carry_out(step) if self._takes_place(step) else before_nbytes
            self.memory.record(max(before_nbytes, highest_nbytes))
        self.step = len(steps)
        if self.schedule.boundary == len(steps):
            self._begin_backward()
        self._check_end()

    def _takes_place(self, step: Step) -> bool:
        """Whether a step takes place in this pass; see `simulate`."""
        if self.updates:
            return True
        if self.schedule.end is not None and self.step >= self.schedule.end:
            return False
        match step:
            case Start(transfer) | Wait(transfer):
                return self._stored(transfer.value).role is not Role.OPTIMIZER_STATE
            case Free(value) | FreeHost(value):
                return self._stored(value).role is not Role.OPTIMIZER_STATE
            case _:
                return True

    def _carry_out(self, step: Step) -> int:
        """Carry out one step; return the highest device bytes while it runs."""
        match step:
            case Compute():
                return self._compute(step)
            case Free(value):
                self._free(value)
            case Deliver(value):
                self._deliver(value)
            case Start(transfer):
                self._start(transfer)
            case Wait(transfer):
                self._wait(transfer)
            case FreeHost(value):
                self._free_host(value)
            case OptimizerStep():
                return self._optimize(step)
            case _:
                self._fail(f"{shown(step)} is not a step")
        return self.memory.held_nbytes

    # -- compute lane

    def _compute(self, step: Compute) -> int:
        if not 0 <= step.op < len(self.graph.ops):
            self._fail(f"no op {step.op}: the graph has {len(self.graph.ops)}")
        op = self.graph.ops[step.op]
        if not 0 <= step.implementation < len(op.implementations):
            self._fail(f"{op.name} has no implementation {step.implementation}")
        implementation = op.implementations[step.implementation]
        again = step.op in self.ran
        if again:
            rerun = self.ran[step.op]
            if rerun is None:
                self._fail(f"{op.name} may run only once and runs again")
            if step.implementation != rerun:
                self._fail(f"{op.name} repeats implementation {step.implementation}; only {rerun} may repeat")
        else:
            self.ran[step.op] = self._switch(op, step.implementation)
        if not again and not op.backward and self.step >= self.schedule.boundary:
            self._fail(f"forward op {op.name} runs first after the boundary")
        for value in implementation.inputs:
            self._check_readable(value, op.name)

        for value in implementation.outputs:
            if self.graph.values[value].external:
                self._overwrite(value, op.name)
        freed_next = self._freed_next() if implementation.reuses else set()
        still_live = self.memory.compute(implementation, freed_next, self.delivered, self.step)
        if still_live is not None:
            self._fail(f"{op.name} makes {self.graph.values[still_live].name}, which is still live")
        self.last_run = self.step
        self.events.append((Clock.compute, implementation.time_s))
        self.issue_s += implementation.issue_s
        if again:
            self.recomputed_s += implementation.time_s
        return self.memory.highest_nbytes

    def _switch(self, op: Op, implementation: int) -> int | None:
        """Note which switches the first run of an op has on; return the implementation that repeats it."""
        rerun = op.rerun
        chosen = [other for other in op.alternatives if other.first == implementation]
        if chosen:
            rerun = chosen[0].again
        elif op.alternatives and implementation != 0:
            self._fail(f"{op.name} first runs implementation {implementation}, which is only for repeats")
        for other in op.alternatives:
            if self.switched.setdefault(other.switch, other in chosen) != (other in chosen):
                self._fail(f"{op.name} disagrees with an op before it about {other.switch!r}")
        return rerun

    def _freed_next(self) -> set[int]:
        """Values whose `Free` steps follow directly."""
        freed = set()
        steps, position = self.schedule.steps, self.step + 1
        while position < len(steps) and isinstance(step := steps[position], Free):
            freed.add(step.value)
            position += 1
        return freed

    def _check_readable(self, value: int, reader: str) -> None:
        stored = self.graph.values[value]
        if value in self.overwritten:
            self._fail(f"{reader} reads {stored.name}, which has been overwritten since")
        if stored.external:
            if value in self.produced and value not in self.written:
                self._fail(f"{reader} reads {stored.name}, which has not been written yet")
            return
        if value in self.delivered:
            self._fail(f"{reader} reads gradient {stored.name}, which was delivered")
        if value not in self.memory.on_device:
            self._fail(f"{reader} reads {stored.name}, which is not live")
        if self._is_pending(value, Lane.TO_DEVICE):
            self._fail(f"{reader} reads {stored.name}, whose transfer was not waited for")
        if value in self.updated and value not in self.stale_on_device:
            self._fail(f"{reader} reads {stored.name}, which the optimizer has already changed")

    def _overwrite(self, value: int, writer: str) -> None:
        stored = self.graph.values[value]
        if value in self.written:
            self._fail(f"{writer} writes {stored.name} a second time")
        self.written.add(value)
        if stored.replaces is not None:
            if stored.replaces in self.produced and stored.replaces not in self.written:
                earlier = self.graph.values[stored.replaces].name
                self._fail(f"{writer} writes {stored.name} before {earlier}, the version it replaces")
            self.overwritten.add(stored.replaces)

    def _stored(self, value: int) -> Value:
        if not 0 <= value < len(self.graph.values):
            self._fail(f"no value {value}: the graph has {len(self.graph.values)}")
        return self.graph.values[value]

    def _free(self, value: int) -> None:
        stored = self._stored(value)
        if value not in self.memory.on_device:
            self._fail(f"{stored.name} is freed but not live")
        if stored.role is Role.OUTPUT:
            self._fail(f"output {stored.name} is freed, but the caller holds it")
        if stored.role is Role.GRAD and value not in self.memory.on_host and value not in self.spent:
            self._fail(f"gradient {stored.name} is freed before it is delivered, moved or used")
        if self._is_pending(value):
            self._fail(f"{stored.name} is freed while its transfer is pending")
        if stored.role is Role.DROPPED:
            self.freed[value] = self.step
        self.memory.free(value)
        self.stale_on_device.discard(value)

    def _is_pending(self, value: int, lane: Lane | None = None) -> bool:
        """Whether a transfer of the value is pending, on one lane or on any."""
        lanes = self.pending.get(value)
        return lanes is not None and (lane is None or lane in lanes)

    def _deliver(self, value: int) -> None:
        stored = self._stored(value)
        moved = value in self.memory.on_host and value not in self.memory.on_device
        if stored.role is not Role.GRAD or not (moved or value in self.memory.on_device):
            self._fail(f"{stored.name} is delivered but is not a live gradient")
        if self._is_pending(value):
            self._fail(f"{stored.name} is delivered while its transfer is pending")
        self.delivered[value] = Placement.HOST if moved else Placement.DEVICE
        if moved and self.adds:
            self.events.append((Clock.add, value))
        owner = None if stored.of is None else self.graph.values[stored.of]
        added = owner is not None and owner.role is Role.PARAM
        bytes_stay = self.grads is Grads.NEW or (self.grads is Grads.PRESENT and not added)
        if moved:
            self.memory.free_on_host(value, bytes_stay=bytes_stay)
        else:
            self.memory.free(value, bytes_stay=bytes_stay)

    def _begin_backward(self) -> None:
        self.memory.host_peak_forward_nbytes = self.memory.host_peak_nbytes
        for value in self.graph.dropped:
            if value not in self.memory.on_device and self.freed.get(value, -1) < self.last_run:
                self._fail(f"output {self.graph.values[value].name} is not live when the forward ends")
        for value in self.graph.tangents:
            self.memory.allocate(value)
        self.memory.note_peak(self.step)

    # -- transfers and the optimizer

    def _start(self, transfer: Transfer) -> None:
        value, stored = transfer.value, self._stored(transfer.value)
        if self._is_pending(value, transfer.lane):
            self._fail(f"{stored.name} has a pending transfer in that direction already")
        if transfer.lane is Lane.TO_HOST:
            self._check_source(value, self.memory.on_device, "the device")
            if value not in self.memory.on_host:
                self.memory.allocate_on_host(value)
            elif value not in self.stale_on_host:
                self._fail(f"{stored.name} has a host copy already")
            self._keep_staleness(value, self.stale_on_device, self.stale_on_host)
        else:
            self._check_source(value, self.memory.on_host, "the host")
            if value not in self.memory.on_device:
                self.memory.allocate(value)
                self.memory.note_peak(self.step)
            elif value not in self.stale_on_device:
                self._fail(f"{stored.name} is on the device already")
            self._keep_staleness(value, self.stale_on_host, self.stale_on_device)
        self.pending.setdefault(value, set()).add(transfer.lane)
        if self.schedule.end is not None and self.step >= self.schedule.end:
            self.events.append((Clock.issue, transfer))
        self.events.append((Clock.start, transfer))

    def _check_source(self, value: int, present: set[int], where: str) -> None:
        stored = self.graph.values[value]
        if value not in present or value in self.delivered:
            self._fail(f"{stored.name} is copied from {where} but is not there")
        # A copy to the host may be pending, because lanes order that; a copy to the device may not.
        if present is self.memory.on_device and self._is_pending(value, Lane.TO_DEVICE):
            self._fail(f"{stored.name} is copied from {where} while it arrives")

    def _keep_staleness(self, value: int, source: set[int], destination: set[int]) -> None:
        destination.discard(value)
        if value in source:
            destination.add(value)

    def _wait(self, transfer: Transfer) -> None:
        if not self._is_pending(transfer.value, transfer.lane):
            self._fail(f"a wait for {self._stored(transfer.value).name}, which has no pending transfer")
        self.pending[transfer.value].discard(transfer.lane)
        if not self.pending[transfer.value]:
            del self.pending[transfer.value]
        self.events.append((Clock.wait_for, transfer))

    def _free_host(self, value: int) -> None:
        stored = self._stored(value)
        if value not in self.memory.on_host:
            self._fail(f"{stored.name} is freed on the host but is not there")
        if self._is_pending(value):
            self._fail(f"{stored.name} is freed on the host while its transfer is pending")
        # The CPU optimizer may still use the copy, and nothing else waits for that lane.
        self.events.append((Clock.wait_for_host, value))
        self.memory.free_on_host(value)
        self.stale_on_host.discard(value)

    def _optimize(self, step: OptimizerStep) -> int:
        name = self._stored(step.value).name
        update = self.update_of.get(step.value)
        if update is None:
            self._fail(f"the graph has no optimizer update for {name}")
        if update.grad in self.spent:
            self._fail(f"{name} is updated twice")
        on_cpu = step.lane is Lane.CPU_OPTIMIZER
        present = self.memory.on_host if on_cpu else self.memory.on_device
        delivered = self.delivered.get(update.grad) is (Placement.HOST if on_cpu else Placement.DEVICE)
        needed = (update.param, update.grad, *update.states) if self.updates else (update.grad,)
        for value in needed:
            if value not in present and not (value == update.grad and delivered):
                where = "the host" if on_cpu else "the device"
                self._fail(f"the update of {name} needs {self.graph.values[value].name} on {where}")
            if not on_cpu and self._is_pending(value, Lane.TO_DEVICE):
                self._fail(f"the update of {name} reads {self.graph.values[value].name} while it arrives")
        self.spent.add(update.grad)
        if on_cpu and self.adds and not delivered:
            self.events.append((Clock.add, update.grad))
        if not self.updates:
            return self.memory.held_nbytes
        changed = (update.param, *update.states)
        outgoing = Lane.TO_DEVICE if on_cpu else Lane.TO_HOST
        for value in changed:
            if self._is_pending(value, outgoing):
                self._fail(f"the update of {name} changes {self.graph.values[value].name} while it is copied")
        self.updated.update(changed)
        other_copies = self.memory.on_device if on_cpu else self.memory.on_host
        stale = self.stale_on_device if on_cpu else self.stale_on_host
        stale.update(value for value in changed if value in other_copies)
        if on_cpu:
            self.events.append((Clock.update, update))
            return self.memory.held_nbytes
        self.events.append((Clock.compute, update.device_time_s))
        workspace_nbytes = update.workspace_nbytes
        self.memory.note_peak(self.step, workspace_nbytes)
        return self.memory.held_nbytes + workspace_nbytes

    def _check_end(self) -> None:
        for index, op in enumerate(self.graph.ops):
            if index not in self.ran:
                self._fail(f"{op.name} never runs")
        if self.pending:
            self._fail(f"{sum(map(len, self.pending.values()))} transfers are never waited for")
        for grad in self.graph.gradients:
            if grad not in self.delivered and grad not in self.spent:
                self._fail(f"gradient {self.graph.values[grad].name} is never delivered")
        for update in self.graph.updates:
            if update.grad not in self.spent and update.grad not in self.delivered:
                self._fail(f"{self.graph.values[update.param].name} is never updated")
        for index, value in enumerate(self.graph.values):
            if value.placement is None:
                continue
            on_device = value.placement is Placement.DEVICE
            present = self.memory.on_device if on_device else self.memory.on_host
            stale = self.stale_on_device if on_device else self.stale_on_host
            if index not in present or index in stale:
                self._fail(f"{value.name} must end up to date on the {value.placement}, where it is placed")

    def unread_nbytes(self) -> int:
        """Bytes of gradients on the host when the pass ends, which pending updates still read."""
        unread = self.memory.on_host.intersection(self.graph.gradients)
        if self.grads is not Grads.ACCUMULATE:
            unread |= {grad for grad, where in self.delivered.items() if where is Placement.HOST}
        return sum(self.graph.values[grad].nbytes for grad in unread)

    def _fail(self, problem: str) -> NoReturn:
        raise InvalidSchedule(step=self.step, problem=problem)
