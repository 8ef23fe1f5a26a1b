"""Where each value lives: on the device, or on the host in a block of a capped pool.

What is placed on the host lies in such a block: parameters, whose ``.data`` is one, and optimizer states.
`Residency` reserves the blocks, copies between them and the device, and brings home what was given other
memory meanwhile.
"""

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor, nn

from remat_executor.torch_private.tensors import past_torch_function, storage_holders
from remat_graph import (
    Graph,
    Lane,
    Placement,
)
from remat_offload.engine.weight_loading import WeightReader, rebind_storage
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import HostPool
from remat_offload.machine.base import Machine, Ticket
from remat_offload.optimizer.chunking import overlapping


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
    """What is placed on the host.

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


class Residency:
    """Where the values of one model live, on the host and on the device.

    Args:
        machine: the device, the host, and what lies between.
        pool: host memory.

    Attributes:
        params: the distinct parameters of the model, in the order of a graph's values.
        residents: what is placed on the host, by the names of its values.
    """

    def __init__(self, machine: Machine, pool: HostPool) -> None:
        self.machine, self.pool = machine, pool
        self.params: tuple[nn.Parameter, ...] = ()
        self.residents: dict[str, Resident] = {}
        self._places: dict[str, Tensor] = {}  # on the host, reserved for what is not there yet
        self._named_params: list[tuple[str, nn.Parameter]] = []
        self._moved: dict[nn.Parameter, str] = {}
        self._device_layouts: dict[str, Layout] = {}
        self._shared_blocks: dict[
            str, list[tuple[Tensor, object]]
        ] = {}  # homes, with their content, that somebody
        # else held when they were left
        self._locations: dict[str, _Location] = {}  # where each parameter lay last
        self._storages: dict[str, int] = {}  # bytes of the storages that parameters have on the device

    def settle(
        self,
        graph: Graph,
        params: Sequence[nn.Parameter],
        buffers: Iterable[Tensor] = (),
        reader: WeightReader | None = None,
    ) -> None:
        """Bring every parameter to its home, and buffers to the device.

        Args:
            graph: a training step; parameters come first among its values, in the order of `params`.
            params: the distinct parameters of the model.
            buffers: its buffers.
            reader: gives values to those that it has some for, in their new places.

        Raises:
            HostPoolExhausted: the host budget is spent; nothing was changed.
            CannotPin: the host's memory cannot be pinned; nothing was changed.
        """
        self._places = self._allocate_blocks(graph, params)
        for buffer in buffers:
            self._move_to_device(buffer, reader)
        self.params = tuple(params)
        values = graph.values[: len(self.params)]
        self._named_params = [(value.name, param) for value, param in zip(values, self.params, strict=True)]
        for value, param in zip(graph.values, self.params, strict=False):
            if value.placement is not Placement.HOST:
                self._move_to_device(param, reader)
                self._device_layouts[value.name] = Layout.of(param)
                self._storages[value.name] = param.untyped_storage().nbytes()
                continue
            resident = self.reserve_on_host(value.name, Layout.of(param))
            if reader is not None and reader.has(param):
                reader.read(param, resident.tensor)
            else:
                resident.whole.copy_(bytes_of(param.data))
            rebind_storage(param, resident.tensor)
            self._moved[param] = value.name
            if param.grad is not None:
                param.grad = param.grad.to("cpu")
        self._locations = {name: _location(param) for name, param in self._named_params}

    def _move_to_device(self, tensor: Tensor, reader: WeightReader | None) -> None:
        """Bring a parameter or buffer to the device, with the values that it is to have."""
        there = tensor.data
        if reader is not None and reader.has(tensor):
            if tensor.device != self.machine.device:
                there = self.machine.allocate(tensor.shape, tensor.stride(), tensor.dtype)
            reader.read(tensor, there)
        elif tensor.device != self.machine.device:
            there = there.to(self.machine.device)
        rebind_storage(tensor, there)

    def reserve_on_host(self, name: str, layout: Layout) -> Resident:
        """Give a value that is placed on the host the place there that is reserved for it."""
        self.residents[name] = Resident(self._places.pop(name), layout)
        return self.residents[name]

    def _allocate_blocks(self, graph: Graph, params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        """Places for all that is placed on the host, taken before anything moves."""
        taken: dict[str, Tensor] = {}
        try:
            for i, value in enumerate(graph.values):
                if value.placement is Placement.HOST:
                    nbytes = params[i].untyped_storage().nbytes() if i < len(params) else value.nbytes
                    taken[value.name] = self.pool.allocate(nbytes)
        except BaseException:
            for block in taken.values():
                self.pool.release(block)
            raise
        return taken

    def check_identity(self, flat: Sequence[Tensor]) -> None:
        """See that a call is given the parameters that have their homes here.

        Raises:
            OffloadMisuse: one is another object.
        """
        for (name, param), given in zip(self._named_params, flat, strict=False):
            if param is not given:
                raise OffloadMisuse(
                    problem=f"{name} is another Parameter than the one that was planned and is stepped",
                    advice="give that one values, by `.data` or copy_(), or build the module anew",
                )

    def displaced(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that lie elsewhere than they did; nobody has to wait for that to be known."""
        with past_torch_function():
            return [
                (name, param)
                for name, param in self._named_params
                if _location(param) != self._locations[name]
            ]

    def check(self, displaced: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See that parameters can go home.

        Raises:
            OffloadMisuse: one has another shape, type or device now, or shares memory with another: its plan
                is none any more.
        """
        for name, param in displaced:
            resident = self.residents.get(name)
            home = self._device_layouts[name] if resident is None else resident.layout
            place = self.machine.device if resident is None else resident.whole.device
            now = Layout.of(param)
            if differences := _differences(home, now, param.device, {place, self.machine.device}):
                raise OffloadMisuse(
                    problem=f"{name} {differences}",
                    advice="build the module anew from the original, its `module`",
                )
        names = [name for name, _ in self._named_params]
        if displaced and (pair := overlapping(self.params)) is not None:
            raise OffloadMisuse(
                problem=f"{names[pair[0]]} and {names[pair[1]]} share memory now, and were planned apart",
                advice="give each its own, or tie them by one Parameter and build the module anew",
            )

    def restore_placement(self, displaced: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Bring home parameters that have other memory; nothing is under way, and `check` has passed.

        Raises:
            HostPoolExhausted: there is no room for another home.
        """
        for name, param in displaced:
            resident, now = self.residents.get(name), Layout.of(param)
            if resident is not None:
                if now != resident.layout or param.data_ptr() != resident.tensor.data_ptr():
                    self._copy_into_block(name, resident, param)
            elif (
                now != self._device_layouts[name]
                or param.device != self.machine.device
                or param.untyped_storage().nbytes() > self._storages[name]
            ):
                param.data = self._copied_to_layout(self._device_layouts[name], param.data)
            self._locations[name] = _location(param)

    def placements(self) -> list[object]:
        """What tells, compared later, whether a parameter was given other values than by writing to it."""
        return [
            (self._locations[name], self.residents[name].content if name in self.residents else None)
            for name, _ in self._named_params
        ]

    def _copied_to_layout(self, layout: Layout, values: Tensor) -> Tensor:
        """Values in memory of their own on the device, as a plan wants them."""
        steps = (stride * (size - 1) for size, stride in zip(layout.size, layout.stride, strict=True))
        numel = layout.offset + 1 + sum(steps)
        place = layout.on(self.machine.allocate((numel * layout.dtype.itemsize,), (1,), torch.uint8))
        place.copy_(values)
        return place

    def _copy_into_block(self, name: str, resident: Resident, param: nn.Parameter) -> None:
        """Let a home hold what its parameter is, whose memory is another."""
        former = self._shared_blocks.setdefault(name, [])
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
        self._shared_blocks[name] = left

    @property
    def device(self) -> torch.device:
        """Where it brings what moves."""
        return self.machine.device

    def moves(self, param: nn.Parameter) -> bool:
        """Whether a parameter is placed on the host; see `WeightFetcher`."""
        return param in self._moved

    def fetch(self, param: nn.Parameter) -> Tensor:
        """A copy of a moved parameter, on the device, for compute that is given from now on."""
        name = self._moved[param]
        resident = self.residents[name]
        there, ticket = self.copy_to_device(name)
        self.machine.wait_on_compute(ticket)
        return resident.layout.on(there)

    def write_back(self, param: nn.Parameter, lent: Tensor) -> None:
        """Let a moved parameter be what its copy is."""
        name = self._moved[param]
        resident = self.residents[name]
        after = resident.before_writing()
        resident.written = self.machine.copy(
            Lane.TO_HOST, resident.whole, bytes_of(lent), after, f"{name} to the host"
        )
        resident.written.synchronize()
        torch.autograd.graph.increment_version(param)  # as a write in place does

    def copy_to_device(self, name: str) -> tuple[Tensor, Ticket]:
        """The bytes of a resident on the device, and their copy, which comes after what writes them."""
        resident = self.residents[name]
        there = self.machine.allocate((resident.whole.numel(),), (1,), torch.uint8)
        after = [] if resident.written is None else [resident.written]
        ticket = self.machine.copy(Lane.TO_DEVICE, there, resident.whole, after, f"{name} to the device")
        resident.read = ticket
        return there, ticket

    def write_back_newer(self) -> None:
        """Copy home what an update left on the device, where something came between that and its copy."""
        for name, resident in self.residents.items():
            if resident.newer is not None:
                self.copy_to_host(name, resident.newer)

    def copy_to_host(self, name: str, newer: Tensor) -> Ticket:
        """Copy the bytes of a resident home from the device."""
        resident = self.residents[name]
        ticket = self.machine.copy(
            Lane.TO_HOST, resident.whole, newer, resident.before_writing(), f"{name} to the host"
        )
        resident.written, resident.newer = ticket, None
        return ticket

    def forget_tickets(self) -> None:
        """Note that no copy and no update is under way."""
        for resident in self.residents.values():
            resident.written = resident.read = None

    def params_on_host(self) -> list[nn.Parameter]:
        """The parameters that are."""
        return [param for name, param in self._named_params if name in self.residents]

    def names_of(self, params: Iterable[nn.Parameter]) -> list[str]:
        """Names of parameters, in the model's order."""
        among = set(params)
        return [name for name, param in self._named_params if param in among]


_Location = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _location(param: nn.Parameter) -> _Location:
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


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
