"""Apply the memory rule: the bytes that one pass over a schedule holds on each side, and their peaks."""

from collections.abc import Container, Set

import attrs

from remat_graph.ir import Graph, Implementation


@attrs.define(eq=False)
class Memory:
    """What one pass over a schedule holds, and the highest bytes so far."""

    graph: Graph
    on_device: set[int] = attrs.field(factory=set)  # values with storage on the device
    on_host: set[int] = attrs.field(factory=set)  # values with a host copy
    held_nbytes: int = 0  # device bytes, with the allocator's rounding
    held_exact_nbytes: int = 0  # device bytes of storages alone
    host_nbytes: int = 0  # bytes of host copies
    highest_nbytes: int = 0  # most device bytes while the latest op ran
    peak_nbytes: int = 0  # highest device bytes, with rounding and workspaces
    peak_step: int = 0
    live_peak_nbytes: int = 0  # highest device bytes of storages alone
    host_peak_nbytes: int = 0
    host_peak_forward_nbytes: int = 0  # `host_peak_nbytes` before the backward begins
    live_nbytes: list[int] = attrs.field(factory=list)  # per step, device bytes after it
    during_nbytes: list[int] = attrs.field(factory=list)  # per step, highest device bytes while it runs
    host_after_nbytes: list[int] = attrs.field(factory=list)  # per step, bytes of host copies after it
    _taken_over: set[int] = attrs.field(factory=set)  # values whose storage belongs to an output now

    def allocate(self, value: int) -> None:
        """Allocate a value on the device."""
        self.on_device.add(value)
        self.held_nbytes += self.graph.allocated_nbytes(value)
        self.held_exact_nbytes += 0 if self.graph.values[value].external else self.graph.values[value].nbytes

    def compute(
        self, implementation: Implementation, freed_next: Set[int], delivered: Container[int], step: int
    ) -> int | None:
        """Apply the memory rule to one run of an op: outputs come live before inputs may be freed.

        The workspace lives while the op runs. An output takes over the storage of an input in `reuses` that
        is in `freed_next`, the values freed directly after. A repeat that makes a pinned value makes a copy,
        which is freed as soon as the op ends. `highest_nbytes` is then the most that the op holds.

        Returns:
            An output that is still live and so cannot be made, or None.
        """
        new: list[int] = []
        own_nbytes = own_exact_nbytes = 0
        values = self.graph.values
        dying = {v for _, v in implementation.reuses if v in freed_next and not values[v].external}
        for value in implementation.outputs:
            stored = values[value]
            if stored.external:
                continue
            exists = value in self.on_device or value in delivered
            sources = (s for made, s in implementation.reuses if made == value and s in dying)
            source = None if exists else next(sources, None)
            if source is not None:
                dying.remove(source)
                self.take_over(value, source)
                continue
            own_nbytes += self.graph.allocated_nbytes(value)
            own_exact_nbytes += stored.nbytes
            if not exists:
                new.append(value)
            elif not stored.pinned:
                return value
        self.highest_nbytes = self.held_nbytes + own_nbytes + implementation.workspace_nbytes
        self.note_peak(step, own_nbytes + implementation.workspace_nbytes, own_exact_nbytes)
        for value in new:
            self.allocate(value)
        return None

    def take_over(self, value: int, source: int) -> None:
        """Put a value into the storage of another one, whose later `Free` then releases no bytes."""
        self.on_device.add(value)
        self._taken_over.add(source)

    def free(self, value: int, *, bytes_stay: bool = False) -> None:
        """Free a value on the device; its bytes stay counted if another owner holds them."""
        self.on_device.discard(value)
        if value in self._taken_over:
            self._taken_over.discard(value)
        elif not bytes_stay:
            self.held_nbytes -= self.graph.allocated_nbytes(value)
            self.held_exact_nbytes -= self.graph.values[value].nbytes

    def allocate_on_host(self, value: int) -> None:
        """Allocate the host copy of a value."""
        self.on_host.add(value)
        self.host_nbytes += self.graph.values[value].nbytes
        self.host_peak_nbytes = max(self.host_peak_nbytes, self.host_nbytes)

    def free_on_host(self, value: int, *, bytes_stay: bool = False) -> None:
        """Free the host copy of a value; its bytes stay counted if another owner holds them."""
        self.on_host.discard(value)
        if not bytes_stay:
            self.host_nbytes -= self.graph.values[value].nbytes

    def note_peak(self, step: int, extra_nbytes: int = 0, extra_exact_nbytes: int = 0) -> None:
        """Update the peaks for a moment at which a step holds extra bytes."""
        if self.held_nbytes + extra_nbytes > self.peak_nbytes:
            self.peak_nbytes, self.peak_step = self.held_nbytes + extra_nbytes, step
        self.live_peak_nbytes = max(self.live_peak_nbytes, self.held_exact_nbytes + extra_exact_nbytes)

    def record(self, highest_nbytes: int) -> None:
        """Record the bytes held after a step, and `highest_nbytes`, the most that it held while it ran."""
        self.live_nbytes.append(self.held_nbytes)
        self.host_after_nbytes.append(self.host_nbytes)
        self.during_nbytes.append(max(self.held_nbytes, highest_nbytes))
