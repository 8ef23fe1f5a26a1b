"""The handler of one call: carries out the steps of its schedule that are no compute.

For a call a parameter's bytes are copied to the device, and dropped there when the schedule says so; a
gradient's are copied to the host and handed over there. Each copy waits for what wrote its source: the update
of a parameter on the CPU, the copy that brought an activation.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from remat_executor.lowering.step_handler import Action
from remat_executor.module.planned_step import PlannedStep
from remat_executor.torch_private.tensors import past_torch_function, tensor_versions
from remat_graph import (
    Deliver,
    Free,
    FreeHost,
    Graph,
    Lane,
    OptimizerStep,
    Placement,
    Role,
    Start,
    Transfer,
    Update,
    Wait,
)
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.residency import Layout, Residency, Resident, bytes_of
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import Event, HostPool
from remat_offload.machine.base import Machine, Ticket
from remat_offload.optimizer.clipping import Clipping


class Updates(Protocol):
    """How parameters are updated; the engine says when and where."""

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is the optimizer's."""
        ...

    def displaced(self) -> Sequence[Tensor]:
        """Parameters of which a state lies in other memory than its home on the host."""
        ...

    def restore_placement(self, param: Tensor) -> None:
        """Bring states home that were given other memory."""
        ...

    def on_device(self, param: nn.Parameter, grad: Tensor, states: Mapping[str, Tensor]) -> None:
        """Update one whose data and gradient are on the device; `states` were brought there for it."""
        ...

    def on_host(
        self, param: nn.Parameter, data: Tensor, grad: Tensor, scale: Tensor | None
    ) -> Callable[[], None]:
        """The update of one whose data, gradient and states are on the host, made in a lane's thread.

        `scale` is what the gradient is multiplied with first.
        """
        ...


class EngineState(Protocol):
    """What the steps of a call use of the engine.

    Attributes:
        residency: where values live.
        updates: how parameters are updated.
        clipping: norms and scales of gradients.
        accumulating: whether updates within a backward add their gradients up instead.
        added_up: parameters with gradients that the next backward that steps shall step by.
        owner: gives what must not go while a call is under way, the module.
    """

    residency: Residency
    updates: Updates
    clipping: Clipping
    accumulating: bool
    added_up: set[nn.Parameter]
    owner: Callable[[], object]

    def restore_placement(self) -> None:
        """Bring home what was given other memory meanwhile."""
        ...

    def mark_pending(self, param: nn.Parameter, work: Event) -> None:
        """Let whoever reads a parameter, or asks for its gradient, wait first."""
        ...


class Transfers:
    """Carries out the steps of one call, or of the optimizer's."""

    def __init__(self, engine: EngineState, step: PlannedStep) -> None:
        self.engine, self.residency = engine, engine.residency
        self.step, self.graph = step, step.graph
        self.machine = self.residency.machine
        self.owner = engine.owner()
        self.tickets: dict[Transfer, Ticket] = {}
        self.away: dict[int, Tensor] = {}  # bytes on the host of values that do not live there
        self.layouts: dict[int, Layout] = {}  # how they lay on the device
        self.reading: dict[int, Ticket] = {}  # work on the CPU, by the gradients that it reads
        self.flying: dict[Transfer, Tensor] = {}  # on the device, being copied: nobody has waited yet
        self.placements = self.residency.placements()
        self.versions = tensor_versions(self.residency.params)
        pool = self.residency.pool
        # A call whose backward never runs leaves activations behind, and copies.
        weakref.finalize(self, _abandon, pool, self.machine, self.graph, self.away, self.tickets, self.flying)

    def carry_out(self, step: Action, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """See `StepHandler`."""
        self.machine.check()
        match step:
            case Start() | Wait() | Free() if self.needless(step, live):
                pass
            case Start(transfer) if transfer.lane is Lane.TO_HOST:
                self.flying[transfer] = live[transfer.value]
                self.send(transfer, live[transfer.value])
            case Start(transfer):
                live[transfer.value] = self.flying[transfer] = self.fetch(transfer)
            case Wait(transfer):
                self.machine.wait_on_compute(self.tickets[transfer])
                self.flying.pop(transfer, None)
            case Free(value):
                self.machine.release(live.pop(value))
            case FreeHost(value):
                if value in self.reading:  # the plan counts its bytes until then, and no longer
                    self.reading.pop(value).wait()
                _let_go(self.residency.pool, self.graph, self.away, self.tickets, value)
            case Deliver(value):
                return [self.hand_over(value)]
            case OptimizerStep():
                carry_out = self.add if self.engine.accumulating else self.update
                carry_out(step, live)
                return [None]
        return ()

    def begin_backward(self) -> None:
        """See `StepHandler`.

        Raises:
            OffloadMisuse: a parameter was given other values since the forward. What autograd saved of one
                would be the old values for some operators, and the new ones for others.
        """
        if self.residency.displaced():
            self.engine.restore_placement()
        now = zip(self.residency.params, self.placements, self.residency.placements(), strict=True)
        if changed := self.residency.names_of(param for param, before, after in now if before != after):
            raise OffloadMisuse(
                problem=f"{changed[0]} was given other memory between a forward and its backward",
                advice="assign to `.data` before the forward or after the backward",
            )

    def needless(self, step: Start | Wait | Free, live: dict[int, Tensor]) -> bool:
        """Whether it is about an optimizer state that stays at home, since nothing is stepped.

        What is done is seen from what was done, not from whether gradients are added up now: the forward may
        lie outside of what the backward lies in.
        """
        value = step.value if isinstance(step, Free) else step.transfer.value
        if self.graph.values[value].role is not Role.OPTIMIZER_STATE:
            return False
        match step:
            case Start(transfer) if transfer.lane is Lane.TO_DEVICE:
                return self.engine.accumulating
            case Wait(transfer):
                return transfer not in self.tickets
            case _:
                return value not in live

    def resident(self, value: int) -> Resident | None:
        """A value's home on the host, if it has one."""
        return self.residency.residents.get(self.graph.values[value].name)

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Copy a value to the host."""
        value, source = transfer.value, bytes_of(tensor)
        resident = self.resident(value)
        if resident is None:
            self.layouts[value] = Layout.of(tensor)
            pool = self.residency.pool
            take = pool.lease if self.graph.values[value].role is Role.GRAD else pool.allocate
            destination = self.away[value] = take(source.numel())
            name = f"{self.graph.values[value].name} to the host"
            self.tickets[transfer] = self.machine.copy(Lane.TO_HOST, destination, source, (), name)
        else:
            self.tickets[transfer] = self.residency.copy_to_host(self.graph.values[value].name, source)

    def fetch(self, transfer: Transfer) -> Tensor:
        """Bring a value from the host."""
        value, name = transfer.value, self.graph.values[transfer.value].name
        resident = self.resident(value)
        if resident is not None:
            if value < len(self.versions) and self.residency.params[value]._version != self.versions[value]:
                raise OffloadMisuse(
                    problem=f"{name} was written in place between a forward and its backward, which reads it",
                    advice="write to it before the forward or after the backward",
                )
            there, self.tickets[transfer] = self.residency.copy_to_device(name)
            return resident.layout.on(there)
        whole, layout = self.away[value], self.layouts[value]
        there = self.machine.allocate((whole.numel(),), (1,), torch.uint8)
        after = [self.tickets[Transfer(value, Lane.TO_HOST)]]
        self.tickets[transfer] = self.machine.copy(
            Lane.TO_DEVICE, there, whole, after, f"{name} to the device"
        )
        return layout.on(there)

    def hand_over(self, value: int) -> Tensor:
        """The gradient on the host, for autograd, which reads it at once."""
        owner = self.graph.values[value].of
        assert owner is not None
        self.engine.clipping.before_adding(self.residency.params[owner])
        self.tickets[Transfer(value, Lane.TO_HOST)].synchronize()
        return self.gradient(value, self.away.pop(value))

    def update(self, step: OptimizerStep, live: dict[int, Tensor]) -> None:
        """Update a parameter: in the backward by the gradient just made, afterwards by its ``.grad``."""
        self.engine.added_up.clear()
        with uninterrupted():
            self.update_by(self.step.updates[step.value], step.lane, live)

    def update_unplanned(self, update: Update, live: dict[int, Tensor]) -> None:
        """Update a parameter of which the plan knows nothing by its ``.grad``, where it is at home."""
        if self.graph.values[update.param].placement is Placement.HOST:
            self.update_by(update, Lane.CPU_OPTIMIZER, live)
            return
        self.update_by(update, Lane.COMPUTE, live)
        for value in update.states:
            if self.resident(value) is not None:
                out = Transfer(value, Lane.TO_HOST)
                for step in (Start(out), Wait(out), Free(value)):
                    self.carry_out(step, live)

    def update_by(self, update: Update, lane: Lane, live: dict[int, Tensor]) -> None:
        """Update a parameter in a lane."""
        param, name = self.residency.params[update.param], self.graph.values[update.param].name
        if lane is Lane.COMPUTE:
            for value in update.states:
                if value not in live and self.resident(value) is not None:  # the forward was to step nothing
                    transfer = Transfer(value, Lane.TO_DEVICE)
                    live[value] = self.fetch(transfer)
                    self.machine.wait_on_compute(self.tickets[transfer])
            states = {
                self.graph.values[v].name.removeprefix(f"{name}."): live[v]
                for v in update.states
                if v in live
            }
            grad, new, _ = self.gradients(update, live)
            for value in update.states:
                if value in live and (resident := self.resident(value)) is not None:
                    resident.newer = bytes_of(live[value])
            self.engine.updates.on_device(param, grad if new is None else grad.add_(new), states)
            return
        grad, new, after = self.gradients(update, live)
        resident = self.residency.residents[name]
        homes = [resident, *(r for v in update.states if (r := self.resident(v)) is not None)]
        scale = self.engine.clipping.scale_of(param)
        make = self.engine.updates.on_host(param, resident.tensor, grad, scale)

        def work() -> None:
            with torch.no_grad(), past_torch_function():
                if new is not None:
                    grad.add_(new)
                make()

        after += [ticket for home in homes for ticket in home.before_writing()]
        ticket = self.machine.work(work, after, name=f"the update of {name}")
        self.reading[update.grad] = ticket
        for home in homes:
            home.written = ticket

    def add(self, step: OptimizerStep, live: dict[int, Tensor]) -> None:
        """Add the gradient just made to those of earlier backwards, for one that will step by them all."""
        param, name = self.residency.params[step.value], self.graph.values[step.value].name
        update = self.step.updates[step.value]
        grad, new, after = self.gradients(update, live)
        if step.lane is Lane.COMPUTE:
            if new is not None:
                grad.add_(new)
        elif new is not None:
            added = new

            def work() -> None:
                with torch.no_grad():
                    grad.add_(added)

            ticket = self.machine.work(work, after, name=f"adding to the gradient of {name}")
            self.reading[update.grad] = ticket
            after = [ticket]
        with past_torch_function():
            param.grad = grad
        for ticket in after:
            self.engine.mark_pending(param, ticket)

    def gradients(
        self, update: Update, live: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Ticket]]:
        """What to step by: the gradient, what is to be added to it, and what brings that; it is no one's now.

        In the optimizer's call it is ``.grad``, and stays so.
        """
        param = self.residency.params[update.param]
        with past_torch_function():
            held = param.grad
            if held is not None and live.get(update.grad) is held:
                return held, None, []
            param.grad = None
        if update.grad in self.away:
            whole, after = self.away[update.grad], [self.tickets[Transfer(update.grad, Lane.TO_HOST)]]
        else:
            whole, after = bytes_of(live[update.grad]), []
        new = self.gradient(update.grad, whole)
        return (new, None, after) if held is None else (held, new, after)

    def gradient(self, value: int, whole: Tensor) -> Tensor:
        """A gradient as autograd would take it, on its bytes."""
        size, stride, dtype = self.step.gradient_layout(value)
        return Layout(size, stride, 0, dtype).on(whole)


def _let_go(
    pool: HostPool,
    graph: Graph,
    away: dict[int, Tensor],
    tickets: Mapping[Transfer, Ticket],
    value: int,
) -> None:
    """Drop a host copy; gradients are leased, and come back by themselves."""
    whole = away.pop(value)
    if graph.values[value].role is not Role.GRAD:
        out, back = Transfer(value, Lane.TO_HOST), Transfer(value, Lane.TO_DEVICE)
        pool.release(whole, after=tickets.get(back, tickets[out]))


def _abandon(
    pool: HostPool,
    machine: Machine,
    graph: Graph,
    away: dict[int, Tensor],
    tickets: Mapping[Transfer, Ticket],
    flying: Mapping[Transfer, Tensor],
) -> None:
    for tensor in flying.values():
        machine.release_after_copies(tensor)
    for value in list(away):
        _let_go(pool, graph, away, tickets, value)
