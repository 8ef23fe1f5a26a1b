"""The engine: carries out what a schedule does beside computing, for one model.

What is at home on the host lies in blocks of a capped pool: parameters, whose ``.data`` is such a block, and
optimizer states. For a call a parameter's bytes are copied to the device, and dropped there when the schedule
says so; a gradient's are copied to the host and handed over there. Each copy waits for what wrote its source:
the update of a parameter on the CPU, the copy that brought an activation.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol, cast

import attrs
import torch
from torch import Tensor, nn

from remat_executor.lowering.step_handler import Action
from remat_executor.module.planned_step import PlannedStep
from remat_executor.torch_private.tensors import past_torch_function, storage_holders, tensor_versions
from remat_graph import (
    Deliver,
    Free,
    FreeHost,
    Graph,
    Home,
    Lane,
    OptimizerStep,
    Role,
    Start,
    Transfer,
    Update,
    Wait,
)
from remat_graph.contexts import context
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.pending_parameters import land, take_off
from remat_offload.engine.weight_loading import Filler, let_lie
from remat_offload.errors import LaneFailed, OffloadMisuse
from remat_offload.host_memory.pool import Event, HostPool
from remat_offload.machine.base import Machine, Ticket
from remat_offload.optimizer.chunking import overlapping
from remat_offload.optimizer.clipping import Clipping


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
        layout: how its tensor lies in them.
        written: the work that writes them last; None if nobody does.
        read: the latest copy that reads them.
        holders: how many hold its bytes' storage if nobody does but the pool and this.
        content: stands for the values that were last assigned to it.
        newer: on the device, the bytes that an update has left there and nobody has copied home yet.
    """

    whole: Tensor
    layout: Layout
    written: Ticket | None = None
    read: Ticket | None = None
    newer: Tensor | None = None
    content: object = attrs.field(factory=object)
    holders: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.holders = storage_holders(self.whole)

    @property
    def tensor(self) -> Tensor:
        """The tensor on the host."""
        return self.layout.on(self.whole)

    def before_writing(self) -> list[Ticket]:
        """What a writer comes after."""
        return [ticket for ticket in (self.written, self.read) if ticket is not None]


class Updates(Protocol):
    """How parameters are updated; the engine says when and where."""

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is the optimizer's."""
        ...

    def strayed(self) -> Sequence[Tensor]:
        """Parameters of which a state lies in other memory than its home on the host."""
        ...

    def take_back(self, param: Tensor) -> None:
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


class Engine:
    """Makes the handler of each call, and holds what lasts between calls.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory.
        updates: how parameters are updated.

    Attributes:
        params: the distinct parameters of the model, in the order of a graph's values.
        residents: what is at home on the host, by the names of its values.
        clipping: norms and scales of gradients.
        accumulating: whether updates within a backward add their gradients up instead.
        added_up: parameters with gradients that the next backward that steps shall step by.
        owner: gives what must not go while a call is under way, the module; the engine does not keep it.
    """

    def __init__(self, machine: Machine, pool: HostPool, updates: Updates) -> None:
        self.machine, self.pool, self.updates = machine, pool, updates
        self.params: tuple[nn.Parameter, ...] = ()
        self.residents: dict[str, Resident] = {}
        self._places: dict[str, Tensor] = {}  # on the host, reserved for what is not there yet
        self._homes: list[tuple[str, nn.Parameter]] = []
        self._moved: dict[nn.Parameter, str] = {}
        self._device_layouts: dict[str, Layout] = {}
        self._former: dict[str, list[tuple[Tensor, object]]] = {}  # homes, with their content, that somebody
        # else held when they were left
        self._spots: dict[str, _Spot] = {}  # where each parameter lay last
        self._storages: dict[str, int] = {}  # bytes of the storages that parameters have on the device
        self._in_flight: dict[nn.Parameter, Event] = {}
        self.clipping = Clipping(machine, self.let_wait)
        self.accumulating = False
        self.added_up: set[nn.Parameter] = set()
        self._latest: PlannedStep | None = None
        self.owner: Callable[[], object] = int

    # -- between calls

    def settle(
        self,
        graph: Graph,
        params: Sequence[nn.Parameter],
        buffers: Iterable[Tensor] = (),
        filler: Filler | None = None,
    ) -> None:
        """Bring every parameter to its home, and buffers to the device.

        Args:
            graph: a training step; parameters come first among its values, in the order of `params`.
            params: the distinct parameters of the model.
            buffers: its buffers.
            filler: gives values to those that it has some for, in their new places.

        Raises:
            HostPoolExhausted: the host budget is spent; nothing was changed.
            CannotPin: the host's memory cannot be pinned; nothing was changed.
        """
        self._places = self._reserved(graph, params)
        for buffer in buffers:
            self._bring_there(buffer, filler)
        self.params = tuple(params)
        values = graph.values[: len(self.params)]
        self._homes = [(value.name, param) for value, param in zip(values, self.params, strict=True)]
        for value, param in zip(graph.values, self.params, strict=False):
            if value.home is not Home.HOST:
                self._bring_there(param, filler)
                self._device_layouts[value.name] = Layout.of(param)
                self._storages[value.name] = param.untyped_storage().nbytes()
                continue
            resident = self.house(value.name, Layout.of(param))
            if filler is not None and filler.has(param):
                filler.read(param, resident.tensor)
            else:
                resident.whole.copy_(_bytes_of(param.data))
            let_lie(param, resident.tensor)
            self._moved[param] = value.name
            if param.grad is not None:
                param.grad = param.grad.to("cpu")
        self._spots = {name: _spot(param) for name, param in self._homes}

    def _bring_there(self, tensor: Tensor, filler: Filler | None) -> None:
        """Bring a parameter or buffer to the device, with the values that it is to have."""
        there = tensor.data
        if filler is not None and filler.has(tensor):
            if tensor.device != self.machine.device:
                there = self.machine.allocate(tensor.shape, tensor.stride(), tensor.dtype)
            filler.read(tensor, there)
        elif tensor.device != self.machine.device:
            there = there.to(self.machine.device)
        let_lie(tensor, there)

    def house(self, name: str, layout: Layout) -> Resident:
        """Give a value that is at home on the host the place there that is reserved for it."""
        self.residents[name] = Resident(self._places.pop(name), layout)
        return self.residents[name]

    def _reserved(self, graph: Graph, params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        """Places for all that is at home on the host, taken before anything moves."""
        taken: dict[str, Tensor] = {}
        try:
            for i, value in enumerate(graph.values):
                if value.home is Home.HOST:
                    nbytes = params[i].untyped_storage().nbytes() if i < len(params) else value.nbytes
                    taken[value.name] = self.pool.allocate(nbytes)
        except BaseException:
            for block in taken.values():
                self.pool.release(block)
            raise
        return taken

    def begin(self, step: PlannedStep) -> "Transfers":
        """The handler of one call."""
        self._bring_home()
        self._latest = step
        return Transfers(self, step)

    def check_identity(self, flat: Sequence[Tensor]) -> None:
        """See that a call is given the parameters that have their homes here.

        Raises:
            OffloadMisuse: one is another object.
        """
        for (name, param), given in zip(self._homes, flat, strict=False):
            if param is not given:
                raise OffloadMisuse(
                    problem=f"{name} is another Parameter than the one that was planned and is stepped",
                    advice="give that one values, by `.data` or copy_(), or build the module anew",
                )

    def strayed(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that lie elsewhere than they did; nobody has to wait for that to be known."""
        with past_torch_function():
            return [(name, param) for name, param in self._homes if _spot(param) != self._spots[name]]

    def take_back(self) -> None:
        """Bring home what was given other memory meanwhile, by ``.data = ...`` or ``load``, say.

        Values go on from there, as in plain training. Who else holds a home, after values have been
        swapped, keeps what is in it: the parameter gets another.

        Raises:
            OffloadMisuse: a parameter has another shape, type or device now, or shares memory with another:
                its plan is none any more. Nothing was moved.
            HostPoolExhausted: there is no room for another home.
        """
        strayed, states = self.strayed(), self.updates.strayed()
        if not strayed and not states:
            return
        self._check(strayed)
        self.wait()
        for name, param in strayed:
            resident, now = self.residents.get(name), Layout.of(param)
            if resident is not None:
                if now != resident.layout or param.data_ptr() != resident.tensor.data_ptr():
                    self._rehouse(name, resident, param)
            elif (
                now != self._device_layouts[name]
                or param.device != self.machine.device
                or param.untyped_storage().nbytes() > self._storages[name]
            ):
                param.data = self._laid_out(self._device_layouts[name], param.data)
            self._spots[name] = _spot(param)
        for owner in states:
            self.updates.take_back(owner)

    def _check(self, strayed: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See that parameters can go home."""
        for name, param in strayed:
            resident = self.residents.get(name)
            home = self._device_layouts[name] if resident is None else resident.layout
            place = self.machine.device if resident is None else resident.whole.device
            now = Layout.of(param)
            if differences := _differences(home, now, param.device, {place, self.machine.device}):
                raise OffloadMisuse(
                    problem=f"{name} {differences}",
                    advice="build the module anew from the original, its `module`",
                )
        names = [name for name, _ in self._homes]
        if strayed and (pair := overlapping(self.params)) is not None:
            raise OffloadMisuse(
                problem=f"{names[pair[0]]} and {names[pair[1]]} share memory now, and were planned apart",
                advice="give each its own, or tie them by one Parameter and build the module anew",
            )

    def whereabouts(self) -> list[object]:
        """What tells, compared later, whether a parameter was given other values than by writing to it."""
        return [
            (self._spots[name], self.residents[name].content if name in self.residents else None)
            for name, _ in self._homes
        ]

    def _laid_out(self, layout: Layout, values: Tensor) -> Tensor:
        """Values in memory of their own on the device, as a plan wants them."""
        steps = (stride * (size - 1) for size, stride in zip(layout.size, layout.stride, strict=True))
        numel = layout.offset + 1 + sum(steps)
        place = layout.on(self.machine.allocate((numel * layout.dtype.itemsize,), (1,), torch.uint8))
        place.copy_(values)
        return place

    def _rehouse(self, name: str, resident: Resident, param: nn.Parameter) -> None:
        """Let a home hold what its parameter is, whose memory is another."""
        former = self._former.setdefault(name, [])
        for place, (whole, content) in enumerate(former):
            if (
                resident.layout == Layout.of(param)
                and resident.layout.on(whole).data_ptr() == param.data_ptr()
            ):
                former[place] = (resident.whole, resident.content)  # values were swapped back
                resident.whole, resident.content = whole, content
                break
        else:
            values = param.data.clone()
            if storage_holders(resident.whole) > resident.holders:
                whole = self.pool.allocate(resident.whole.numel())
                former.append((resident.whole, resident.content))
                resident.whole = whole
            resident.tensor.copy_(values)
            resident.content = object()
            param.data = resident.tensor
        left = [pair for pair in former if storage_holders(pair[0]) > resident.holders]
        for whole, _ in former:
            if not any(whole is kept for kept, _ in left):
                self.pool.release(whole)
        self._former[name] = left

    @property
    def device(self) -> torch.device:
        """Where it brings what moves."""
        return self.machine.device

    def moves(self, param: nn.Parameter) -> bool:
        """Whether a parameter is at home on the host; see `Lender`."""
        return param in self._moved

    def lend(self, param: nn.Parameter) -> Tensor:
        """A copy of a moved parameter, on the device, for compute that is given from now on."""
        name = self._moved[param]
        resident = self.residents[name]
        there, ticket = self.bring(name)
        self.machine.hold(ticket)
        return resident.layout.on(there)

    def take_home(self, param: nn.Parameter, lent: Tensor) -> None:
        """Let a moved parameter be what its copy is."""
        name = self._moved[param]
        resident = self.residents[name]
        after = resident.before_writing()
        resident.written = self.machine.copy(
            Lane.TO_HOST, resident.whole, _bytes_of(lent), after, f"{name} to the host"
        )
        resident.written.synchronize()
        torch.autograd.graph.increment_version(param)  # as a write in place does

    def bring(self, name: str) -> tuple[Tensor, Ticket]:
        """The bytes of a resident on the device, and their copy, which comes after what writes them."""
        resident = self.residents[name]
        there = self.machine.allocate((resident.whole.numel(),), (1,), torch.uint8)
        after = [] if resident.written is None else [resident.written]
        ticket = self.machine.copy(Lane.TO_DEVICE, there, resident.whole, after, f"{name} to the device")
        resident.read = ticket
        return there, ticket

    @context
    def grounded(self) -> Generator[None, None, None]:
        """Within it parameters are ordinary, and who reads one waits for its update himself, as a call does.

        Those whose updates are under way at its end, however it ends, are in flight again.
        """
        try:
            for param in self._in_flight:
                land(param)
            yield
        finally:
            with uninterrupted() if self._in_flight else nullcontext():
                self._in_flight = {param: work for param, work in self._in_flight.items() if not work.query()}
                for param, work in self._in_flight.items():
                    take_off(param, work)

    def wait(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out. Its parameter is as it was: load a checkpoint, or go on.
        """
        self._bring_home()
        try:
            self.machine.drain()
        except LaneFailed:
            self._land()
            raise
        self._land()

    def _land(self) -> None:
        """Nothing is under way, and what failed has been told: let all parameters be ordinary."""
        for param in self._in_flight:
            land(param)
        self._in_flight.clear()
        for resident in self.residents.values():
            resident.written = resident.read = None

    def _bring_home(self) -> None:
        """Copy home what an update left on the device, where something came between that and its copy."""
        for name, resident in self.residents.items():
            if resident.newer is not None:
                self.send_home(name, resident.newer)

    def send_home(self, name: str, newer: Tensor) -> Ticket:
        """Copy the bytes of a resident home from the device."""
        resident = self.residents[name]
        ticket = self.machine.copy(
            Lane.TO_HOST, resident.whole, newer, resident.before_writing(), f"{name} to the host"
        )
        resident.written, resident.newer = ticket, None
        return ticket

    def let_wait(self, param: nn.Parameter, work: Event) -> None:
        """Let whoever reads a parameter, or asks for its gradient, wait first."""
        self._in_flight[param] = work
        take_off(param, work)

    def at_home_on_host(self) -> list[nn.Parameter]:
        """The parameters that are."""
        return [param for name, param in self._homes if name in self.residents]

    def names_of(self, params: Iterable[nn.Parameter]) -> list[str]:
        """Names of parameters, in the model's order."""
        among = set(params)
        return [name for name, param in self._homes if param in among]

    def step(self) -> None:
        """Carry out what the schedule of the latest call has after its backward: the optimizer's step.

        Updates on the CPU are under way when this returns.

        Raises:
            OffloadMisuse: no forward has run.
            LaneFailed: an update of the step before could not be carried out.
        """
        step = self._latest
        if step is None:
            raise OffloadMisuse(
                problem="the optimizer is to step and no forward has run",
                advice="call the model and backward()",
            )
        self.wait()
        self.take_back()
        without = {p for p, param in enumerate(self.params) if param.grad is None}
        live = {
            update.grad: grad
            for update in step.graph.updates
            if (grad := self.params[update.param].grad) is not None
        }
        handler = Transfers(self, step)
        for item in step.program.tail:
            if isinstance(item, OptimizerStep) and item.value in without:
                continue
            with uninterrupted() if isinstance(item, OptimizerStep) else nullcontext():
                handler.carry_out(cast(Action, item), live)
                if isinstance(item, OptimizerStep) and item.lane is Lane.CPU_OPTIMIZER:
                    self._take_off(step.graph.values[item.value].name, self.params[item.value])
        for update in self._left_out(step):
            live[update.grad] = cast(Tensor, self.params[update.param].grad)
            with uninterrupted():
                handler.update_unplanned(update, live)
                if step.graph.values[update.param].home is Home.HOST:
                    self._take_off(step.graph.values[update.param].name, self.params[update.param])

    def _left_out(self, step: PlannedStep) -> list[Update]:
        """Updates that the plan of a call does not know.

        Their gradients are of another forward, frozen since, or of something outside of the model.
        """
        found = []
        for place, param in enumerate(self.params):
            if place not in step.updates and param.grad is not None and self.updates.has(param):
                values = enumerate(step.graph.values)
                states = [i for i, v in values if v.role is Role.OPTIMIZER_STATE and v.of == place]
                found.append(Update(param=place, grad=len(step.graph.values) + place, states=states))
        return found

    def _take_off(self, name: str, param: nn.Parameter) -> None:
        ticket = self.residents[name].written
        if ticket is not None:
            self.let_wait(param, ticket)


class Transfers:
    """Carries out the steps of one call, or of the optimizer's."""

    def __init__(self, engine: Engine, step: PlannedStep) -> None:
        self.engine, self.step, self.graph = engine, step, step.graph
        self.machine = engine.machine
        self.owner = engine.owner()
        self.tickets: dict[Transfer, Ticket] = {}
        self.away: dict[int, Tensor] = {}  # bytes on the host of values that do not live there
        self.layouts: dict[int, Layout] = {}  # how they lay on the device
        self.reading: dict[int, Ticket] = {}  # work on the CPU, by the gradients that it reads
        self.flying: dict[Transfer, Tensor] = {}  # on the device, being copied: nobody has waited yet
        self.whereabouts = engine.whereabouts()
        self.versions = tensor_versions(engine.params)
        # A call whose backward never runs leaves activations behind, and copies.
        weakref.finalize(
            self, _abandon, engine.pool, engine.machine, self.graph, self.away, self.tickets, self.flying
        )

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
                self.machine.hold(self.tickets[transfer])
                self.flying.pop(transfer, None)
            case Free(value):
                self.machine.discard(live.pop(value))
            case FreeHost(value):
                if value in self.reading:  # the plan counts its bytes until then, and no longer
                    self.reading.pop(value).wait()
                _let_go(self.engine.pool, self.graph, self.away, self.tickets, value)
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
        engine = self.engine
        if engine.strayed():
            engine.take_back()
        now = zip(engine.params, self.whereabouts, engine.whereabouts(), strict=True)
        if changed := engine.names_of(param for param, before, after in now if before != after):
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
        return self.engine.residents.get(self.graph.values[value].name)

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Copy a value to the host."""
        value, source = transfer.value, _bytes_of(tensor)
        resident = self.resident(value)
        if resident is None:
            self.layouts[value] = Layout.of(tensor)
            pool = self.engine.pool
            take = pool.lease if self.graph.values[value].role is Role.GRAD else pool.allocate
            destination = self.away[value] = take(source.numel())
            name = f"{self.graph.values[value].name} to the host"
            self.tickets[transfer] = self.machine.copy(Lane.TO_HOST, destination, source, (), name)
        else:
            self.tickets[transfer] = self.engine.send_home(self.graph.values[value].name, source)

    def fetch(self, transfer: Transfer) -> Tensor:
        """Bring a value from the host."""
        value, name = transfer.value, self.graph.values[transfer.value].name
        resident = self.resident(value)
        if resident is not None:
            if value < len(self.versions) and self.engine.params[value]._version != self.versions[value]:
                raise OffloadMisuse(
                    problem=f"{name} was written in place between a forward and its backward, which reads it",
                    advice="write to it before the forward or after the backward",
                )
            there, self.tickets[transfer] = self.engine.bring(name)
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
        self.engine.clipping.before_adding(self.engine.params[owner])
        self.tickets[Transfer(value, Lane.TO_HOST)].synchronize()
        return self.gradient(value, self.away.pop(value))

    def update(self, step: OptimizerStep, live: dict[int, Tensor]) -> None:
        """Update a parameter: in the backward by the gradient just made, afterwards by its ``.grad``."""
        self.engine.added_up.clear()
        with uninterrupted():
            self.update_by(self.step.updates[step.value], step.lane, live)

    def update_unplanned(self, update: Update, live: dict[int, Tensor]) -> None:
        """Update a parameter of which the plan knows nothing by its ``.grad``, where it is at home."""
        if self.graph.values[update.param].home is Home.HOST:
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
        param, name = self.engine.params[update.param], self.graph.values[update.param].name
        if lane is Lane.COMPUTE:
            for value in update.states:
                if value not in live and self.resident(value) is not None:  # the forward was to step nothing
                    transfer = Transfer(value, Lane.TO_DEVICE)
                    live[value] = self.fetch(transfer)
                    self.machine.hold(self.tickets[transfer])
            states = {
                self.graph.values[v].name.removeprefix(f"{name}."): live[v]
                for v in update.states
                if v in live
            }
            grad, new, _ = self.gradients(update, live)
            for value in update.states:
                if value in live and (resident := self.resident(value)) is not None:
                    resident.newer = _bytes_of(live[value])
            self.engine.updates.on_device(param, grad if new is None else grad.add_(new), states)
            return
        grad, new, after = self.gradients(update, live)
        resident = self.engine.residents[name]
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
        param, name = self.engine.params[step.value], self.graph.values[step.value].name
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
            self.engine.let_wait(param, ticket)

    def gradients(
        self, update: Update, live: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Ticket]]:
        """What to step by: the gradient, what is to be added to it, and what brings that; it is no one's now.

        In the optimizer's call it is ``.grad``, and stays so.
        """
        param = self.engine.params[update.param]
        with past_torch_function():
            held = param.grad
            if held is not None and live.get(update.grad) is held:
                return held, None, []
            param.grad = None
        if update.grad in self.away:
            whole, after = self.away[update.grad], [self.tickets[Transfer(update.grad, Lane.TO_HOST)]]
        else:
            whole, after = _bytes_of(live[update.grad]), []
        new = self.gradient(update.grad, whole)
        return (new, None, after) if held is None else (held, new, after)

    def gradient(self, value: int, whole: Tensor) -> Tensor:
        """A gradient as autograd would take it, on its bytes."""
        size, stride, dtype = self.step.gradient_layout(value)
        return Layout(size, stride, 0, dtype).on(whole)


_Spot = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _spot(param: nn.Parameter) -> _Spot:
    """Where a parameter lies, and how."""
    nbytes = param.untyped_storage().nbytes()
    return param.data_ptr(), nbytes, param.shape, param.stride(), param.dtype, param.device


def _differences(home: Layout, now: Layout, device: torch.device, places: set[torch.device]) -> str:
    """In what a parameter is not what was planned, beyond where it lies in memory; empty if in nothing."""
    found = []
    if now.dtype != home.dtype:
        found.append(f"is {now.dtype} now, and was planned as {home.dtype}")
    if now.size != home.size:
        found.append(f"has the shape {now.size} now, and was planned with {home.size}")
    if device not in places:
        found.append(f"is on {device} now, and was planned for {' or '.join(sorted(map(str, places)))}")
    return ", ".join(found)


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
        machine.leave(tensor)
    for value in list(away):
        _let_go(pool, graph, away, tickets, value)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
