"""`Residency` knows where each value is placed: on the device, or on the host in a block of a capped pool.

Blocks on the host hold parameters, whose ``.data`` is then a block, and optimizer states. `Residency`
reserves the blocks, copies between them and the device, and restores the placement of parameters that were
given other memory.
"""

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor, nn

from remat_executor.torch_private.tensors import past_torch_function, storage_holders
from remat_graph import Graph, Lane, Placement
from remat_offload.copy_lanes.machine import Machine, Ticket
from remat_offload.deferred_signals import uninterrupted
from remat_offload.engine.weight_loading import WeightReader
from remat_offload.errors import OffloadMisuse
from remat_offload.host_memory.pool import HostPool
from remat_offload.tensor_memory import Layout, bytes_of, overlapping, rebind_storage


@attrs.define(eq=False)
class Resident:
    """A value that is placed on the host."""

    whole: Tensor  # its block on the host, as bytes
    layout: Layout  # of its tensor in the block
    written: Ticket | None = None  # the latest work that writes the block; None if no write is pending
    read: Ticket | None = None  # the latest copy that reads the block
    newer: Tensor | None = None  # bytes that an update has left on the device, not copied to the host yet
    content: object = attrs.field(factory=object)  # stands for the values; a new one after each assignment
    holders: int = attrs.field(init=False)  # of the block's storage, if only the pool and this object use it

    def __attrs_post_init__(self) -> None:
        self.holders = storage_holders(self.whole)

    @property
    def tensor(self) -> Tensor:
        """The tensor on the host."""
        return self.layout.on(self.whole)

    def before_writing(self) -> list[Ticket]:
        """Return the tickets that a write of the block has to wait for."""
        return [ticket for ticket in (self.written, self.read) if ticket is not None]


class Residency:
    """Where the values of one model are placed, on the host and on the device.

    Attributes:
        params: the distinct parameters of the model, in the order of a graph's values.
        residents: values that are placed on the host, by name.
    """

    def __init__(self, machine: Machine, pool: HostPool) -> None:
        self.machine, self.pool = machine, pool
        self.params: tuple[nn.Parameter, ...] = ()
        self.residents: dict[str, Resident] = {}
        self._blocks: dict[str, Tensor] = {}  # on the host, reserved for values that do not exist yet
        self._named_params: list[tuple[str, nn.Parameter]] = []
        self._on_host: dict[nn.Parameter, str] = {}
        self._device_layouts: dict[str, Layout] = {}
        # Blocks that a parameter has left while someone else used them, each with its content.
        self._left_blocks: dict[str, list[tuple[Tensor, object]]] = {}
        self._locations: dict[str, _Location] = {}  # the latest known memory of each parameter
        self._storages: dict[str, int] = {}  # bytes of the storages that parameters have on the device

    def apply_placement(
        self,
        graph: Graph,
        params: Sequence[nn.Parameter],
        buffers: Iterable[Tensor],
        reader: WeightReader | None,
    ) -> None:
        """Move every parameter to its placement, and buffers to the device.

        Args:
            graph: a training step; parameters come first among its values, in the order of `params`.
            params: the distinct parameters of the model.
            buffers: its buffers.
            reader: reads values of tensors directly into their new memory.

        Raises:
            HostPoolExhausted: the host budget is too small; nothing was changed.
            CannotPin: the host's memory cannot be pinned; nothing was changed.
        """
        self._blocks = self._allocate_blocks(graph, params)
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
            else:
                resident = self.reserve_on_host(value.name, Layout.of(param))
                if reader is not None and reader.has(param):
                    reader.read(param, resident.tensor)
                else:
                    resident.whole.copy_(bytes_of(param.data))
                rebind_storage(param, resident.tensor)
                self._on_host[param] = value.name
            if param.grad is not None:
                param.grad = param.grad.to(param.device)
        self._locations = {name: _location(param) for name, param in self._named_params}

    def _move_to_device(self, tensor: Tensor, reader: WeightReader | None) -> None:
        """Move a parameter or buffer to the device, with the reader's values if it has some."""
        moved = tensor.data
        if reader is not None and reader.has(tensor):
            if tensor.device != self.machine.device:
                moved = self.machine.allocate(tensor.shape, tensor.stride(), tensor.dtype)
            reader.read(tensor, moved)
        elif tensor.device != self.machine.device:
            moved = moved.to(self.machine.device)
        rebind_storage(tensor, moved)

    def reserve_on_host(self, name: str, layout: Layout) -> Resident:
        """Make a value resident in the block that is reserved for it."""
        self.residents[name] = Resident(self._blocks.pop(name), layout)
        return self.residents[name]

    def _allocate_blocks(self, graph: Graph, params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        """Allocate blocks for all values placed on the host, before anything moves."""
        blocks: dict[str, Tensor] = {}
        try:
            for i, value in enumerate(graph.values):
                if value.placement is Placement.HOST:
                    nbytes = params[i].untyped_storage().nbytes() if i < len(params) else value.nbytes
                    blocks[value.name] = self.pool.allocate(nbytes)
        except BaseException:
            for block in blocks.values():
                self.pool.release(block)
            raise
        return blocks

    def check_identity(self, flat: Sequence[Tensor]) -> None:
        """Raise `OffloadMisuse` if a call uses parameter objects other than the planned ones."""
        for (name, param), given in zip(self._named_params, flat, strict=False):
            if param is not given:
                raise OffloadMisuse(
                    problem=f"{name} is another Parameter than the one that was planned and is stepped",
                    advice="give the planned one values, by `.data` or copy_(), or build the module again",
                )

    def displaced(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that were given other memory, without waiting for pending updates."""
        with past_torch_function():
            return [
                (name, param)
                for name, param in self._named_params
                if _location(param) != self._locations[name]
            ]

    def check(self, displaced: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise `OffloadMisuse` if the plan is not valid for displaced parameters."""
        for name, param in displaced:
            resident = self.residents.get(name)
            planned = self._device_layouts[name] if resident is None else resident.layout
            device = self.machine.device if resident is None else resident.whole.device
            now = Layout.of(param)
            if differences := _differences(planned, now, param.device, {device, self.machine.device}):
                raise OffloadMisuse(
                    problem=f"{name} {differences}",
                    advice="build the module again from the original, its `module`",
                )
        names = [name for name, _ in self._named_params]
        if displaced and (pair := overlapping(self.params)) is not None:
            raise OffloadMisuse(
                problem=f"{names[pair[0]]} and {names[pair[1]]} share memory, and were planned separately",
                advice="give each its own memory, or tie them by one Parameter and build the module again",
            )

    def restore_placement(self, displaced: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Restore the placement of displaced parameters; no update is pending, and `check` has passed."""
        for name, param in displaced:
            resident, now = self.residents.get(name), Layout.of(param)
            if resident is not None:
                if now != resident.layout or param.data_ptr() != resident.tensor.data_ptr():
                    self._restore_on_host(name, resident, param)
            elif (
                now != self._device_layouts[name]
                or param.device != self.machine.device
                or param.untyped_storage().nbytes() > self._storages[name]
            ):
                param.data = self._copied_to_layout(self._device_layouts[name], param.data)
            self._locations[name] = _location(param)

    def placements(self) -> list[object]:
        """Return keys that differ from earlier ones where a parameter was given other memory."""
        return [
            (self._locations[name], self.residents[name].content if name in self.residents else None)
            for name, _ in self._named_params
        ]

    def _copied_to_layout(self, layout: Layout, values: Tensor) -> Tensor:
        """Copy values to new memory on the device, in the layout that the plan expects."""
        nbytes = layout.offset * layout.dtype.itemsize + layout.reach_nbytes
        copied = layout.on(self.machine.allocate((nbytes,), (1,), torch.uint8))
        copied.copy_(values)
        return copied

    def _restore_on_host(self, name: str, resident: Resident, param: nn.Parameter) -> None:
        """Copy a displaced parameter's values to its block, or use the block in which they are already."""
        left = self._left_blocks.setdefault(name, [])
        for place, (whole, content) in enumerate(left):
            if (
                resident.layout == Layout.of(param)
                and resident.layout.on(whole).data_ptr() == param.data_ptr()
            ):
                left[place] = (resident.whole, resident.content)  # values were swapped back
                resident.whole, resident.content = whole, content
                break
        else:
            values = param.data.clone()
            if storage_holders(resident.whole) > resident.holders:
                whole = self.pool.allocate(resident.whole.numel())
                left.append((resident.whole, resident.content))
                resident.whole = whole
            resident.tensor.copy_(values)
            resident.content = object()
            param.data = resident.tensor
        still_used = [pair for pair in left if storage_holders(pair[0]) > resident.holders]
        for whole, _ in left:
            if not any(whole is used for used, _ in still_used):
                self.pool.release(whole)
        self._left_blocks[name] = still_used

    @property
    def device(self) -> torch.device:
        """The device to which weights are fetched; see `WeightFetcher`."""
        return self.machine.device

    def moves(self, param: nn.Parameter) -> bool:
        """Whether a parameter is placed on the host; see `WeightFetcher`."""
        return param in self._on_host

    def fetch(self, param: nn.Parameter) -> Tensor:
        """Return a copy on the device; see `WeightFetcher`."""
        name = self._on_host[param]
        with uninterrupted():  # a copy that nothing waits for would be written into memory of others
            whole, ticket = self.copy_to_device(name)
            self.machine.wait_on_compute(ticket)
        return self.residents[name].layout.on(whole)

    def write_back(self, param: nn.Parameter, fetched: Tensor) -> None:
        """Copy a fetched copy back to its parameter and wait for that; see `WeightFetcher`."""
        self.copy_to_host(self._on_host[param], bytes_of(fetched)).synchronize()
        torch.autograd.graph.increment_version(param)  # like an in-place write

    def copy_to_device(self, name: str) -> tuple[Tensor, Ticket]:
        """Copy a resident's bytes to the device, after the work that writes them."""
        resident = self.residents[name]
        whole = self.machine.allocate((resident.whole.numel(),), (1,), torch.uint8)
        after = [] if resident.written is None else [resident.written]
        ticket = self.machine.copy(Lane.TO_DEVICE, whole, resident.whole, after, f"{name} to the device")
        resident.read = ticket
        return whole, ticket

    def write_back_newer(self) -> None:
        """Copy values to the host that updates left on the device, if the call ended before their copy."""
        for name, resident in self.residents.items():
            if (newer := resident.newer) is not None:
                self.copy_to_host(name, newer)
                self.machine.release_after_copies(newer)

    def copy_to_host(self, name: str, newer: Tensor) -> Ticket:
        """Copy newer bytes of a resident from the device to its block."""
        resident = self.residents[name]
        ticket = self.machine.copy(
            Lane.TO_HOST, resident.whole, newer, resident.before_writing(), f"{name} to the host"
        )
        resident.written, resident.newer = ticket, None
        return ticket

    def forget_tickets(self) -> None:
        """Drop all tickets: no copy and no update is pending."""
        for resident in self.residents.values():
            resident.written = resident.read = None

    def params_on_host(self) -> list[nn.Parameter]:
        """Return the parameters that are placed on the host."""
        return list(self._on_host)

    def names_of(self, params: Iterable[nn.Parameter]) -> list[str]:
        """Return names of parameters, in the model's order."""
        among = set(params)
        return [name for name, param in self._named_params if param in among]


_Location = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _location(param: nn.Parameter) -> _Location:
    """Return the memory of a parameter, and its layout there."""
    nbytes = param.untyped_storage().nbytes()
    return param.data_ptr(), nbytes, param.shape, param.stride(), param.dtype, param.device


def _differences(planned: Layout, now: Layout, device: torch.device, expected: set[torch.device]) -> str:
    """Describe how a parameter differs from the planned one, other than by its memory; "" if it does not."""
    found = []
    if now.dtype != planned.dtype:
        found.append(f"is {now.dtype} now, and was planned as {planned.dtype}")
    if now.size != planned.size:
        found.append(f"has the shape {now.size} now, and was planned with {planned.size}")
    if device not in expected:
        found.append(f"is on {device} now, and was planned for {' or '.join(sorted(map(str, expected)))}")
    return ", ".join(found)
