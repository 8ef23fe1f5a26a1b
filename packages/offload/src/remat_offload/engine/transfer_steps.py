"""`Transfers` carries out the steps of one call's schedule other than compute.

During a call a parameter's bytes are copied to the device, and dropped there when the schedule says so; a
gradient's bytes are copied to the host and delivered there. Each copy waits for the work that wrote its
source: the update of a parameter on the CPU, or the copy that brought an activation.
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
from remat_offload.copy_lanes.machine import Machine, Ticket
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.accumulation import Accumulation, takes_over_unread
from remat_offload.engine.residency import Residency, Resident
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import Event, HostPool
from remat_offload.optimizer.clipping import Clipping
from remat_offload.optimizer.states import OptimizerStates
from remat_offload.tensor_memory import Layout, bytes_of


class EngineState(Protocol):
    """The attributes and methods of `Engine` that a call uses; `Engine` describes them."""

    residency: Residency
    states: OptimizerStates
    clipping: Clipping
    accumulating: bool
    accumulated: set[nn.Parameter]
    owner: Callable[[], object]

    def restore_placement(self) -> None:
        """Restore values that were given other memory to their placement."""
        ...

    def mark_pending(self, param: nn.Parameter, work: Event) -> None:
        """Make every reader of a parameter or of its gradient wait for the work first."""
        ...


class Transfers:
    """Carries out the steps of one call, or those after its backward."""

    def __init__(self, engine: EngineState, step: PlannedStep) -> None:
        self.engine, self.residency = engine, engine.residency
        self.step, self.graph = step, step.graph
        self.machine = self.residency.machine
        self.accumulation = Accumulation()
        self.reads_gradients = False  # whether the backward reads gradients on the host
        items = (item for segment in step.program.backward for item in segment.items)
        self.undelivered = sum(isinstance(item, Deliver) for item in items)
        self.overlaps = False  # whether another call was pending: autograd may add the gradients of both
        self.owner = engine.owner()
        self.tickets: dict[Transfer, Ticket] = {}
        self.host_copies: dict[int, Tensor] = {}  # bytes on the host of values not placed there
        self.layouts: dict[int, Layout] = {}  # of these values on the device
        self.readers: dict[int, Ticket] = {}  # work on the CPU, by the gradient that it reads
        self.unwaited: dict[Transfer, Tensor] = {}  # on the device, in copies not waited for
        self.placements = self.residency.placements()
        self.versions = tensor_versions(self.residency.params)
        pool = self.residency.pool
        # A call whose backward never runs leaves copies of activations behind.
        weakref.finalize(
            self, _abandon, pool, self.machine, self.graph, self.host_copies, self.tickets, self.unwaited
        )

    def carry_out(self, step: Action, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """See `StepHandler`."""
        self.machine.check()
        self.accumulation.finish()
        match step:
            case Start() | Wait() | Free() if self.skips(step, live):
                pass
            case Start(transfer):
                with uninterrupted():  # a copy without its ticket could not be waited for
                    self.start(transfer, live)
            case Wait(transfer):
                self.machine.wait_on_compute(self.tickets[transfer])
                self.unwaited.pop(transfer, None)
            case Free(value):
                self.machine.release(live.pop(value))
            case FreeHost(value):
                if value in self.readers:  # the plan counts its bytes until then, and no longer
                    self.readers.pop(value).wait()
                with uninterrupted():  # the pool's bytes have one owner at any time
                    _free_host_copy(self.residency.pool, self.graph, self.host_copies, self.tickets, value)
            case Deliver(value):
                return [self.deliver(value)]
            case OptimizerStep():
                (self.accumulate if self.engine.accumulating else self.update)(step, live)
                return [None]
        return ()

    def begin_backward(self) -> None:
        """See `StepHandler`.

        Raises:
            OffloadMisuse: a parameter was given other memory since the forward. Autograd may have saved the
                old values for some operators, while others would read the new ones.
        """
        if self.residency.displaced():
            self.engine.restore_placement()
        now = zip(self.residency.params, self.placements, self.residency.placements(), strict=True)
        if changed := self.residency.names_of(param for param, before, after in now if before != after):
            raise OffloadMisuse(
                problem=f"{changed[0]} was given other memory between a forward and its backward",
                advice="assign to `.data` before the forward or after the backward",
            )

    def read_gradients(self) -> None:
        """See `StepHandler`."""
        self.reads_gradients = True

    def begin_segment(self) -> None:
        """See `StepHandler`."""
        self.accumulation.begin_part()

    def skips(self, step: Start | Wait | Free, live: dict[int, Tensor]) -> bool:
        """Whether a step concerns an optimizer state that stays in its place, since nothing is updated.

        Later steps look at which copies were started, not at `accumulating`: the forward may have run outside
        of the context that the backward runs in.
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
        """Return a value's `Resident`, if it is placed on the host."""
        return self.residency.residents.get(self.graph.values[value].name)

    def start(self, transfer: Transfer, live: dict[int, Tensor]) -> None:
        """Start a copy between device and host."""
        if transfer.lane is Lane.TO_HOST:
            self.unwaited[transfer] = live[transfer.value]
            self.swap_out(transfer, live[transfer.value])
        else:
            live[transfer.value] = self.unwaited[transfer] = self.swap_in(transfer)

    def swap_out(self, transfer: Transfer, tensor: Tensor) -> None:
        """Copy a value to the host."""
        value, source = transfer.value, bytes_of(tensor)
        name = self.graph.values[value].name
        if self.resident(value) is not None:
            self.tickets[transfer] = self.residency.copy_to_host(name, source)
            return
        self.layouts[value] = Layout.of(tensor)
        pool = self.residency.pool
        copies: list[Ticket] = []
        leased = self.graph.values[value].role is Role.GRAD
        nbytes = source.numel()
        destination = pool.lease(nbytes, copies) if leased else pool.allocate(nbytes)
        self.host_copies[value] = destination
        copy = self.machine.copy(Lane.TO_HOST, destination, source, (), f"{name} to the host")
        self.tickets[transfer] = copy
        copies.append(copy)

    def swap_in(self, transfer: Transfer) -> Tensor:
        """Copy a value from the host to the device."""
        value, name = transfer.value, self.graph.values[transfer.value].name
        resident = self.resident(value)
        if resident is not None:
            if value < len(self.versions) and self.residency.params[value]._version != self.versions[value]:
                raise OffloadMisuse(
                    problem=f"{name} was written in place between a forward and its backward, which reads it",
                    advice="write to it before the forward or after the backward",
                )
            whole, self.tickets[transfer] = self.residency.copy_to_device(name)
            return resident.layout.on(whole)
        source, layout = self.host_copies[value], self.layouts[value]
        whole = self.machine.allocate((source.numel(),), (1,), torch.uint8)
        after = [self.tickets[Transfer(value, Lane.TO_HOST)]]
        self.tickets[transfer] = self.machine.copy(
            Lane.TO_DEVICE, whole, source, after, f"{name} to the device"
        )
        return layout.on(whole)

    def deliver(self, value: int) -> Tensor:
        """Return the gradient on the host to autograd, before its bytes have arrived if nothing reads them.

        Then every reader of the parameter or of its gradient waits for them.
        """
        owner = self.graph.values[value].of
        assert owner is not None
        param, copy = self.residency.params[owner], self.tickets[Transfer(value, Lane.TO_HOST)]
        self.engine.clipping.before_adding(param, copy)
        self.undelivered -= 1
        if self.overlaps:  # it adds them when it has both, which may be after this backward
            copy.synchronize()
            return self.gradient(value, self.host_copies.pop(value))
        is_added = self.accumulation.expect(param, copy)
        if is_added and not self.reads_gradients and takes_over_unread(param):
            self.engine.mark_pending(param, copy)
        else:
            copy.synchronize()
        return self.gradient(value, self.host_copies.pop(value))

    def update(self, step: OptimizerStep, live: dict[int, Tensor]) -> None:
        """Update a parameter: in the backward by the gradient just computed, afterwards by its ``.grad``."""
        self.engine.accumulated.clear()
        with uninterrupted():
            self.update_on_lane(self.step.updates[step.value], step.lane, live)

    def update_unplanned(self, update: Update, live: dict[int, Tensor]) -> None:
        """Update a parameter without a planned update by its ``.grad``, on the side where it is placed."""
        if self.graph.values[update.param].placement is Placement.HOST:
            self.update_on_lane(update, Lane.CPU_OPTIMIZER, live)
            return
        self.update_on_lane(update, Lane.COMPUTE, live)
        for value in update.states:
            if self.resident(value) is not None:
                out = Transfer(value, Lane.TO_HOST)
                for step in (Start(out), Wait(out), Free(value)):
                    self.carry_out(step, live)

    def update_on_lane(self, update: Update, lane: Lane, live: dict[int, Tensor]) -> None:
        """Update a parameter in the compute lane or in the CPU's."""
        param, name = self.residency.params[update.param], self.graph.values[update.param].name
        if lane is Lane.COMPUTE:
            for value in update.states:
                if value not in live and self.resident(value) is not None:  # the forward accumulated
                    transfer = Transfer(value, Lane.TO_DEVICE)
                    live[value] = self.swap_in(transfer)
                    self.machine.wait_on_compute(self.tickets[transfer])
            states = {
                self.graph.values[v].name.removeprefix(f"{name}."): live[v]
                for v in update.states
                if v in live
            }
            grad, increment, _ = self.take_gradient(update, live)
            for value in update.states:
                if value in live and (resident := self.resident(value)) is not None:
                    resident.newer = bytes_of(live[value])
            self.engine.states.on_device(param, grad if increment is None else grad.add_(increment), states)
            return
        grad, increment, after = self.take_gradient(update, live)
        resident = self.residency.residents[name]
        written = [resident, *(r for v in update.states if (r := self.resident(v)) is not None)]
        scale = self.engine.clipping.take_scale(param)
        apply = self.engine.states.on_host(param, resident.tensor, grad, scale)

        def work() -> None:
            with torch.no_grad(), past_torch_function():
                if increment is not None:
                    grad.add_(increment)
                apply()

        after += [ticket for each in written for ticket in each.before_writing()]
        ticket = self.machine.work(work, after, name=f"the update of {name}")
        self.readers[update.grad] = ticket
        for each in written:
            each.written = ticket

    def accumulate(self, step: OptimizerStep, live: dict[int, Tensor]) -> None:
        """Add the gradient just computed to those of earlier backwards, for a later update."""
        param, name = self.residency.params[step.value], self.graph.values[step.value].name
        update = self.step.updates[step.value]
        grad, new, after = self.take_gradient(update, live)
        if step.lane is Lane.COMPUTE:
            if new is not None:
                grad.add_(new)
        elif new is not None:
            increment = new

            def work() -> None:
                with torch.no_grad():
                    grad.add_(increment)

            ticket = self.machine.work(work, after, name=f"adding to the gradient of {name}")
            self.readers[update.grad] = ticket
            after = [ticket]
        with past_torch_function():
            param.grad = grad
        for ticket in after:
            self.engine.mark_pending(param, ticket)

    def take_gradient(
        self, update: Update, live: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Ticket]]:
        """Return (gradient, increment or None, tickets to wait for) and take ownership by clearing `.grad`.

        In a step after the backward the gradient is ``.grad`` itself, which is kept.
        """
        param = self.residency.params[update.param]
        with past_torch_function():
            held = param.grad
            if held is not None and live.get(update.grad) is held:
                return held, None, []
            param.grad = None
        if update.grad in self.host_copies:
            whole = self.host_copies[update.grad]
            after = [self.tickets[Transfer(update.grad, Lane.TO_HOST)]]
        else:
            whole, after = bytes_of(live[update.grad]), []
        new = self.gradient(update.grad, whole)
        return (new, None, after) if held is None else (held, new, after)

    def gradient(self, value: int, whole: Tensor) -> Tensor:
        """Return a gradient in the layout that autograd expects, on the given bytes."""
        size, stride, dtype = self.step.gradient_layout(value)
        return Layout(size, stride, 0, dtype).on(whole)


def _free_host_copy(
    pool: HostPool,
    graph: Graph,
    host_copies: dict[int, Tensor],
    tickets: Mapping[Transfer, Ticket],
    value: int,
) -> None:
    """Drop a host copy; gradients are leased, so that the pool takes them back itself."""
    whole = host_copies.pop(value)
    if graph.values[value].role is not Role.GRAD:
        out, back = Transfer(value, Lane.TO_HOST), Transfer(value, Lane.TO_DEVICE)
        pool.release(whole, after=tickets.get(back, tickets.get(out)))  # none if the copy could not start


def _abandon(
    pool: HostPool,
    machine: Machine,
    graph: Graph,
    host_copies: dict[int, Tensor],
    tickets: Mapping[Transfer, Ticket],
    unwaited: Mapping[Transfer, Tensor],
) -> None:
    """Free what a call has left behind whose backward never ran."""
    with uninterrupted():
        for tensor in unwaited.values():
            machine.release_after_copies(tensor)
        for value in list(host_copies):
            _free_host_copy(pool, graph, host_copies, tickets, value)
