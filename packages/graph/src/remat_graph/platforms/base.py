"""Compute the seconds of an op from its operations and bytes, for a device that is not available.

A platform is any object with a `name` and `time_s(cost)`; with an attribute `links`, transfers are planned
over those, and with a method `issue_s(cost)` the step takes at least the time in which the host issues its
ops. Third parties register classes under the entry-point group ``remat.platforms``. Times that are
measured where the plan is made need no platform; those of another device are `measured.Measured`.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, cast, runtime_checkable

import attrs

from remat_graph.errors import UnknownPlatform
from remat_graph.ir import Graph, Implementation
from remat_graph.links import Links

GROUP = "remat.platforms"
BY_DATA_SHEET = "-spec"
"""The ending of names of devices of which nothing was measured."""

_rate = attrs.validators.and_(attrs.validators.gt(0.0), attrs.validators.lt(float("inf")))
_delay = attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.lt(float("inf")))


@attrs.frozen(kw_only=True)
class OpCost:
    """Operations and bytes of one implementation of an op.

    Attributes:
        flops: floating-point operations; a multiply-add counts as two.
        read_nbytes: bytes it reads, each input once.
        written_nbytes: bytes it writes.
        key: ``name(arguments)``: equal keys mean the same operator on the same shapes, strides, dtypes and
            scalars on any device; empty if not known.
        arithmetic: type in which products are computed: a dtype such as ``float32``, or ``tf32``; empty if
            not known.
        parts: for a kernel that does the work of several operators one after the other, those of each; then
            the fields above are their sums, and its time is the sum of theirs.
    """

    flops: float = attrs.field(default=0, validator=attrs.validators.ge(0))
    read_nbytes: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    written_nbytes: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    key: str = ""
    arithmetic: str = ""
    parts: "tuple[OpCost, ...]" = ()

    @property
    def operator(self) -> str:
        """The operator's name, for instance ``aten.mm.default``; empty if not known."""
        return self.key.removeprefix("again: ").partition("(")[0]


@runtime_checkable
class Platform(Protocol):
    """Seconds of an op on some device."""

    @property
    def name(self) -> str:
        """Short and stable; plans record it."""
        ...

    def time_s(self, cost: OpCost) -> float:
        """Seconds of an op of this cost, finite and not negative."""
        ...


@attrs.frozen(kw_only=True)
class Flops:
    """Count FLOPs alone, the unit in which papers compare recomputation.

    One FLOP costs `s_per_flop` seconds; memory traffic is free, so elementwise ops and copies cost little.
    """

    s_per_flop: float = attrs.field(default=1e-12, validator=_rate)

    @property
    def name(self) -> str:
        """``flops``."""
        return "flops"

    def time_s(self, cost: OpCost) -> float:
        """FLOPs times `s_per_flop`."""
        return cost.flops * self.s_per_flop


@attrs.frozen(kw_only=True)
class Roofline:
    """A device whose ops take the longer of computing and moving bytes at full rate, plus a launch.

    The default rates are those of the graph corpus (bf16 on an H100-class device, as kernels reach them).
    """

    flops_per_s: float = attrs.field(default=400e12, converter=float, validator=_rate)
    nbytes_per_s: float = attrs.field(default=3e12, converter=float, validator=_rate)
    launch_s: float = attrs.field(default=0.0, converter=float, validator=_delay)

    @property
    def name(self) -> str:
        """Kind and rates, because other rates give another plan."""
        return f"roofline({self.flops_per_s:g} FLOP/s, {self.nbytes_per_s:g} B/s, launch {self.launch_s:g} s)"

    def time_s(self, cost: OpCost) -> float:
        """The longer of computing and moving bytes, plus the launch."""
        moved_s = (cost.read_nbytes + cost.written_nbytes) / self.nbytes_per_s
        return max(cost.flops / self.flops_per_s, moved_s) + self.launch_s


def time_s_of(platform: Platform, cost: OpCost) -> float:
    """Seconds of an op: of its parts, unless the platform has measured it as a whole."""
    if not cost.parts or cost.key in getattr(platform, "measurements", ()):
        return platform.time_s(cost)
    return sum(platform.time_s(part) for part in cost.parts)


def issue_s_of(platform: Platform, cost: OpCost) -> float:
    """Seconds in which the host issues an op: by the platform's method `issue_s`, or 0 if it has none."""
    issue_s: Callable[[OpCost], float] | None = getattr(platform, "issue_s", None)
    return 0.0 if issue_s is None else issue_s(cost)


def links_of(platform: Platform | None) -> Links | None:
    """Bandwidths between a platform and its host: its attribute `links`, or None if it has none."""
    links: Links | None = getattr(platform, "links", None)
    return links


def platform_names() -> tuple[str, ...]:
    """Names of the installed platforms, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def get_platform(name: str, **options: Any) -> Platform:
    """Make the platform with a name of `platform_names()`; options such as ``flops_per_s`` go to its class.

    A device that is known by its data sheet may be named without the ending: ``v100`` for ``v100-spec``.

    Raises:
        UnknownPlatform: no platform has that name.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = known.get(name) or known.get(f"{name}{BY_DATA_SHEET}")
    if entry is not None:
        return cast(Platform, entry.load()(**options))
    raise UnknownPlatform(name=name, known=platform_names(), ending=BY_DATA_SHEET)


def with_times(graph: Graph, times: Mapping[tuple[int, int], float]) -> Graph:
    """The same graph with new seconds for some implementations, given by (op index, implementation index)."""
    ops = []
    for i, op in enumerate(graph.ops):
        old = enumerate(op.implementations)
        new = tuple(attrs.evolve(each, time_s=times.get((i, k), each.time_s)) for k, each in old)
        ops.append(attrs.evolve(op, implementations=new))
    return attrs.evolve(graph, ops=tuple(ops))


def with_platform(graph: Graph, costs: Mapping[tuple[int, int], OpCost], platform: Platform) -> Graph:
    """The same graph with the times that a platform gives to `costs`, by (op index, implementation index).

    Implementations without a cost keep their times.
    """

    def timed(run: Implementation, cost: OpCost | None) -> Implementation:
        if cost is None:
            return run
        return attrs.evolve(run, time_s=time_s_of(platform, cost), issue_s=issue_s_of(platform, cost))

    ops = []
    for i, op in enumerate(graph.ops):
        runs = tuple(timed(run, costs.get((i, k))) for k, run in enumerate(op.implementations))
        ops.append(attrs.evolve(op, implementations=runs))
    return attrs.evolve(graph, ops=tuple(ops))
