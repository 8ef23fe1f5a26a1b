"""The engine: carries out what a schedule does beside computing, for one model.

What is at home on the host lies in blocks of a capped pool: parameters, whose ``.data`` is such a block, and
optimizer states. For a call a parameter's bytes are copied to the device, and dropped there when the schedule
says so; a gradient's are copied to the host and handed over there. Each copy waits for what wrote its source:
the update of a parameter on the CPU, the copy that brought an activation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.handler import Action
from remat_executor.recipes import OwnGradient
from remat_executor.step import PlannedStep
from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Graph,
    Lane,
    OptimizerStep,
    Role,
    Start,
    Transfer,
    Wait,
)
from remat_offload.errors import OffloadMisuse
from remat_offload.inflight import land, take_off
from remat_offload.lanes import Machine, Ticket
from remat_offload.pool import HostPool


@attrs.frozen
class Layout:
    """How a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """The layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, whole: Tensor) -> Tensor:
        """The tensor of this layout on bytes."""
        return whole.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@attrs.define(eq=False)
class Resident:
    """What is at home on the host.

    Attributes:
        whole: its bytes.
        written: the work that writes them last; None if nobody does.
        read: the latest copy that reads them.
    """

    whole: Tensor
    written: Ticket | None = None
    read: Ticket | None = None

    def before_reading(self) -> list[Ticket]:
        """What a reader comes after."""
        return [] if self.written is None else [self.written]

    def before_writing(self) -> list[Ticket]:
        """What a writer comes after."""
        return [ticket for ticket in (self.written, self.read) if ticket is not None]


class Updates(Protocol):
    """How parameters are updated; the engine says when and where."""

    def on_device(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
        """Update parameters whose data, gradients and states are on the device."""

    def on_host(self, param: nn.Parameter, data: Tensor, grad: Tensor) -> Callable[[], None]:
        """The update of one whose data, gradient and states are on the host, made in a lane's thread."""
        ...


class Engine:
    """Makes the handler of each call, and holds what lasts between calls.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory.
        updates: how parameters are updated.
    """

    def __init__(self, machine: Machine, pool: HostPool, updates: Updates) -> None:
        self.machine, self.pool, self.updates = machine, pool, updates
        self.params: tuple[nn.Parameter, ...] = ()
        self.residents: dict[int, Resident] = {}  # parameters at home on the host, by their index
        self.in_flight: dict[int, Ticket] = {}
        self.latest: PlannedStep | None = None
        self._gradients: dict[int, dict[int, Layout]] = {}

    # -- between calls

    def settle(self, graph: Graph, on_host: frozenset[int], params: Sequence[nn.Parameter]) -> None:
        """Bring every parameter to its home.

        Args:
            graph: a training step; parameters come first among its values, in the order of `params`.
            on_host: indices of the values that are at home on the host.
            params: the distinct parameters of the model.
        """
        self.params = tuple(params)
        for index, param in enumerate(self.params):
            if index in self.residents or graph.values[index].role is not Role.PARAM:
                continue
            if index not in on_host:
                if param.device != self.machine.device:
                    param.data = param.data.to(self.machine.device)
                continue
            layout, nbytes = Layout.of(param), param.untyped_storage().nbytes()
            resident = Resident(self.pool.allocate(nbytes))
            resident.whole.copy_(_bytes_of(param.data))
            param.data = layout.on(resident.whole)
            if param.grad is not None:
                param.grad = param.grad.to("cpu")
            self.residents[index] = resident

    def begin(self, step: PlannedStep) -> "Transfers":
        """The handler of one call."""
        self.land()
        self.latest = step
        if id(step) not in self._gradients:
            self._gradients[id(step)] = _gradients(step)
        return Transfers(self, step.graph, self._gradients[id(step)])

    def land(self) -> None:
        """Let parameters be ordinary again; what is under way goes on."""
        for index in self.in_flight:
            land(self.params[index])
        self.in_flight = {}

    def wait(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out.
        """
        self.land()
        self.machine.drain()

    def step(self, scale: Tensor | None = None) -> None:
        """Carry out what the schedule of the latest call has after its backward: the optimizer's step.

        Updates on the CPU are under way when this returns.
        """
        if self.latest is None:
            raise OffloadMisuse(
                problem="the optimizer is to step and no forward has run",
                advice="call the model and backward()",
            )
        step = self.latest
        self.machine.drain()
        handler = Transfers(self, step.graph, self._gradients[id(step)])
        live = {
            update.grad: grad
            for update in step.graph.updates
            if (grad := self.params[update.param].grad) is not None
        }
        on_device = []
        for item in step.program.tail:
            if isinstance(item, OptimizerStep):
                param = self.params[item.value]
                if param.grad is None:
                    continue
                if item.lane is Lane.COMPUTE:
                    on_device.append(param)
                    continue
                self.update_on_host(item.value, param.grad, [])
                self._take_off(item.value)
            elif not isinstance(item, Compute):
                handler.carry_out(item, live)
        if on_device:
            self.updates.on_device(on_device, [p.grad for p in on_device if p.grad is not None])

    def _take_off(self, index: int) -> None:
        ticket = self.residents[index].written
        if ticket is not None:
            self.in_flight[index] = ticket
            take_off(self.params[index], ticket.synchronize)

    def update_on_host(self, index: int, grad: Tensor, after: Sequence[Ticket]) -> None:
        """Queue the update of a parameter at home on the host."""
        param, resident = self.params[index], self.residents[index]
        data = Layout.of(param).on(resident.whole)

        update = self.updates.on_host(param, data, grad)

        def work() -> None:
            with torch.no_grad(), torch_private.past_torch_function():
                update()

        resident.written = self.machine.work(
            work, after=[*resident.before_writing(), *after], name=f"the update of parameter {index}"
        )


class Transfers:
    """Carries out the steps of one call."""

    def __init__(self, engine: Engine, graph: Graph, gradients: Mapping[int, Layout]) -> None:
        self.engine, self.graph, self.gradients = engine, graph, gradients
        self.machine = engine.machine
        self.tickets: dict[Transfer, Ticket] = {}
        self.away: dict[int, Tensor] = {}  # bytes on the host of values that do not live there
        self.lay: dict[int, Layout] = {}  # how they lay on the device

    def carry_out(self, step: Action, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """See `StepHandler`."""
        match step:
            case Start(transfer) if transfer.lane is Lane.TO_HOST:
                self.send(transfer, live[transfer.value])
            case Start(transfer):
                live[transfer.value] = self.fetch(transfer)
            case Wait(transfer):
                self.machine.hold(self.tickets[transfer])
            case Free(value):
                self.machine.discard(live.pop(value))
            case FreeHost(value):
                self.let_go(value)
            case Deliver(value):
                return [self.hand_over(value)]
            case OptimizerStep():
                return self.update(step, live)
        return ()

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Copy a value to the host."""
        value = transfer.value
        source = _bytes_of(tensor)
        self.lay[value] = Layout.of(tensor)
        is_gradient = self.graph.values[value].role is Role.GRAD
        take = self.engine.pool.lease if is_gradient else self.engine.pool.allocate
        self.away[value] = take(source.numel())
        self.tickets[transfer] = self.machine.copy(
            Lane.TO_HOST, self.away[value], source, name=f"{self.graph.values[value].name} to the host"
        )

    def fetch(self, transfer: Transfer) -> Tensor:
        """Bring a value from the host."""
        value = transfer.value
        resident = self.engine.residents.get(value)
        if resident is not None:
            whole, after, layout = (
                resident.whole,
                resident.before_reading(),
                Layout.of(self.engine.params[value]),
            )
        else:
            whole, after = self.away[value], [self.tickets[Transfer(value, Lane.TO_HOST)]]
            layout = self.lay[value]
        bytes_there = self.machine.allocate((whole.numel(),), (1,), torch.uint8)
        ticket = self.machine.copy(
            Lane.TO_DEVICE, bytes_there, whole, after, name=f"{self.graph.values[value].name} to the device"
        )
        self.tickets[transfer] = ticket
        if resident is not None:
            resident.read = ticket
        return layout.on(bytes_there)

    def let_go(self, value: int) -> None:
        """Drop a host copy."""
        whole = self.away.pop(value)
        if self.graph.values[value].role is not Role.GRAD:
            last = self.tickets.get(
                Transfer(value, Lane.TO_DEVICE), self.tickets[Transfer(value, Lane.TO_HOST)]
            )
            self.engine.pool.release(whole, after=last)

    def hand_over(self, value: int) -> Tensor:
        """The gradient on the host, for autograd, which reads it at once."""
        self.tickets[Transfer(value, Lane.TO_HOST)].synchronize()
        return self.gradients[value].on(self.away.pop(value))

    def update(self, step: OptimizerStep, live: dict[int, Tensor]) -> Sequence[None]:
        """Update a parameter within the backward."""
        (update,) = (u for u in self.graph.updates if u.param == step.value)
        if step.lane is Lane.COMPUTE:
            grad = self.gradients[update.grad].on(_bytes_of(live[update.grad]))
            self.engine.updates.on_device([self.engine.params[step.value]], [grad])
        else:
            grad = self.gradients[update.grad].on(self.away[update.grad])
            self.engine.update_on_host(step.value, grad, [self.tickets[Transfer(update.grad, Lane.TO_HOST)]])
        return [None]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _gradients(step: PlannedStep) -> dict[int, Layout]:
    """How autograd takes each gradient of a planned step, by its value."""
    translation = step.translation
    found = {value: Layout.of(node.meta["val"]) for _, node, value in translation.gradients}
    for op, recipe in zip(step.graph.ops, translation.recipes, strict=True):
        if isinstance(recipe, OwnGradient):
            (value,) = op.first.outputs
            found[value] = attrs.evolve(found[value], size=recipe.size, stride=recipe.stride, offset=0)
    return found
