"""The memory accounts of one pass over a schedule: what is on the device and on the host, and the peaks."""

import attrs

from remat_graph.ir import Graph


@attrs.define(eq=False)
class Memory:
    """What one pass holds, and the most that it ever holds.

    Attributes:
        graph: the graph.
        on_device: values that are there.
        on_host: values of which a copy is there.
        held: device bytes, with the allocator's rounding.
        held_exact: device bytes of storages alone.
        host: bytes of host copies.
        peak: the highest device bytes, with workspaces.
        peak_step: the step at which that is.
        live_peak: the highest device bytes of storages alone.
        host_peak: the highest bytes of host copies.
        host_peak_forward: the same, before the backward begins.
        live: per step, device bytes after it.
        during: per step, the highest device bytes while it runs.
        on_host_after: per step, bytes of host copies after it.
    """

    graph: Graph
    on_device: set[int] = attrs.field(factory=set)
    on_host: set[int] = attrs.field(factory=set)
    held: int = 0
    held_exact: int = 0
    host: int = 0
    peak: int = 0
    peak_step: int = 0
    live_peak: int = 0
    host_peak: int = 0
    host_peak_forward: int = 0
    live: list[int] = attrs.field(factory=list)
    during: list[int] = attrs.field(factory=list)
    on_host_after: list[int] = attrs.field(factory=list)
    _taken_over: set[int] = attrs.field(factory=set)  # its storage belongs to an output by now

    def arrive(self, value: int) -> None:
        """A value comes to the device."""
        self.on_device.add(value)
        self.held += self.graph.allocated_nbytes(value)
        self.held_exact += 0 if self.graph.values[value].external else self.graph.values[value].nbytes

    def take_over(self, value: int, source: int) -> None:
        """A value comes to the device in the storage of another, whose coming Free gives nothing back."""
        self.on_device.add(value)
        self._taken_over.add(source)

    def leave(self, value: int, *, bytes_stay: bool = False) -> None:
        """A value leaves the device; its bytes stay if somebody else holds them."""
        self.on_device.discard(value)
        if value in self._taken_over:
            self._taken_over.discard(value)
        elif not bytes_stay:
            self.held -= self.graph.allocated_nbytes(value)
            self.held_exact -= self.graph.values[value].nbytes

    def arrive_on_host(self, value: int) -> None:
        """A copy of a value comes to the host."""
        self.on_host.add(value)
        self.host += self.graph.values[value].nbytes
        self.host_peak = max(self.host_peak, self.host)

    def leave_host(self, value: int, *, bytes_stay: bool = False) -> None:
        """A copy of a value leaves the host; its bytes stay if somebody else holds them."""
        self.on_host.discard(value)
        if not bytes_stay:
            self.host -= self.graph.values[value].nbytes

    def note_peak(self, step: int, extra: int = 0, extra_exact: int = 0) -> None:
        """Note the bytes of a moment at which a step holds some beside those that stay."""
        if self.held + extra > self.peak:
            self.peak, self.peak_step = self.held + extra, step
        self.live_peak = max(self.live_peak, self.held_exact + extra_exact)

    def record(self, highest: int) -> None:
        """Note what a step leaves; `highest` is the most that it held meanwhile."""
        self.live.append(self.held)
        self.on_host_after.append(self.host)
        self.during.append(max(self.held, highest))
