"""Represent a training step as ops over storages: plain data without torch.

A `Graph` holds `Value` storages and `Op` nodes and refers to both by index. Bytes are ints (``nbytes``),
times are floats in seconds (``_s``). Views do not appear: the op that reads a view makes it.
"""

from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from operator import index

import attrs

MOST_NBYTES = 2**53
"""Largest total size of a graph: sums of sizes stay exact in 64-bit arrays of integers and of floats."""


# Attrs converters need a signature that names the item type, or type checkers lose it.
def as_indices(items: Iterable[int]) -> tuple[int, ...]:
    """Indices as a tuple of ints; numpy's integers become ints, which JSON can hold."""
    return tuple(map(index, items))


def _index_pairs(items: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((index(first), index(second)) for first, second in items)


def _text_pairs(items: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in items)


_seconds = attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.lt(float("inf")))


class Role(StrEnum):
    """What a storage is for."""

    ACTIVATION = "activation"
    OUTPUT = "output"  # made by the forward, held by the caller until the backward ends
    DROPPED = "dropped"  # an output that the caller drops before the backward
    TANGENT = "tangent"  # gradient of an output, live from the boundary on
    PARAM = "param"
    GRAD = "grad"  # delivered to autograd by a `Deliver` step
    OPTIMIZER_STATE = "optimizer_state"
    RNG = "rng"  # generator state, kept so that a recomputed random op draws the same numbers
    BUFFER = "buffer"


class Placement(StrEnum):
    """Where a value that persists across steps must be when a step begins and ends."""

    DEVICE = "device"
    HOST = "host"


@attrs.frozen(kw_only=True)
class Value:
    """One storage.

    Attributes:
        name: unique in its graph.
        nbytes: size of the storage in bytes.
        role: what it is for.
        external: owned by the caller (input, parameter, buffer): always present, never freed, counted as 0
            bytes.
        of: index of the value this one belongs to: the output of a tangent, the parameter of a gradient or
            state.
        replaces: index of the version that this one overwrites; that version cannot be read afterwards.
        chunk_of: name of the tensor of which this value is a part that can move by itself.
        placement: set for values that persist across steps and are counted (parameters that can move,
            optimizer states).
    """

    name: str
    nbytes: int = attrs.field(validator=[attrs.validators.instance_of(int), attrs.validators.ge(0)])
    role: Role = attrs.field(default=Role.ACTIVATION, converter=Role)
    external: bool = False
    of: int | None = None
    replaces: int | None = None
    chunk_of: str | None = None
    placement: Placement | None = attrs.field(default=None, converter=attrs.converters.optional(Placement))

    @property
    def pinned(self) -> bool:
        """Whether the value stays from its first computation until it is delivered or the step ends."""
        return self.role in (Role.OUTPUT, Role.GRAD)


@attrs.frozen(kw_only=True)
class Implementation:
    """One way to run an op.

    Attributes:
        inputs: indices of the values it reads, without repeats.
        outputs: indices of the values it makes.
        time_s: seconds on the compute lane.
        issue_s: seconds in which the host issues it; 0 where the host computes. The host issues while the
            device computes, so a step takes the longer of both sums.
        workspace_nbytes: bytes held while it runs, in addition to its outputs.
        reuses: pairs (output, input): the output takes over the input's storage if the input dies here.
    """

    inputs: tuple[int, ...] = attrs.field(converter=as_indices)
    outputs: tuple[int, ...] = attrs.field(converter=as_indices)
    time_s: float = attrs.field(default=0.0, converter=float, validator=_seconds)
    issue_s: float = attrs.field(default=0.0, converter=float, validator=_seconds)
    workspace_nbytes: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    reuses: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_index_pairs)


def _implementations(items: Iterable[Implementation]) -> tuple[Implementation, ...]:
    return tuple(items)


@attrs.frozen(kw_only=True)
class Alternative:
    """Another way to run an op, in force while a switch is on.

    Its values may be made by other ops while the switch is off, or not at all. An op that only a switch adds
    has a first implementation that reads and makes nothing.

    Attributes:
        switch: name of the switch; alternatives with the same switch are in force together.
        first: index of the implementation of the first run.
        again: index of the implementation that repeats it; None if it must run only once.
        exact: whether its results equal those of the first implementation in every bit.
    """

    switch: str
    first: int
    again: int | None = None
    exact: bool = True


def _alternatives(items: Iterable[Alternative]) -> tuple[Alternative, ...]:
    return tuple(items)


@attrs.frozen(kw_only=True)
class Op:
    """One operation.

    Attributes:
        name: unique in its graph.
        target: the operator it calls, e.g. ``aten.mm.default``.
        backward: whether its first run belongs to the backward (it may still read forward values alone).
        key: structural key: equal keys mean the same kernel on the same shapes.
        rerun: index of the implementation that recomputes its outputs; None if the op must run only once.
        implementations: at least one; a first run may use any that no alternative uses.
        alternatives: other ways to run it, at most one for each switch.
        layer: name of the submodule that it belongs to, such as ``transformer.h.3.mlp``; "" if none is known.
    """

    name: str
    target: str
    backward: bool = False
    key: str = ""
    rerun: int | None = 0
    implementations: tuple[Implementation, ...] = attrs.field(
        converter=_implementations, validator=attrs.validators.min_len(1)
    )
    alternatives: tuple[Alternative, ...] = attrs.field(default=(), converter=_alternatives)
    layer: str = ""

    @property
    def place(self) -> str:
        """The op for people: what it calls, in which layer, and its name."""
        layer = f" in {'the backward of ' if self.backward else ''}{self.layer}" if self.layer else ""
        return f"{self.target}{layer} ({self.name})"

    @property
    def first(self) -> Implementation:
        """The implementation used unless a schedule names another."""
        return self.implementations[0]


@attrs.frozen(kw_only=True)
class Update:
    """The optimizer step of one parameter (or chunk of one).

    Attributes:
        param: index of the parameter value.
        grad: index of its gradient.
        states: indices of its optimizer states.
        device_time_s: seconds on the compute lane.
        cpu_time_s: seconds on the CPU optimizer lane.
        workspace_nbytes: device bytes held while it runs on the device.
    """

    param: int
    grad: int
    states: tuple[int, ...] = attrs.field(default=(), converter=as_indices)
    device_time_s: float = attrs.field(default=0.0, converter=float, validator=_seconds)
    cpu_time_s: float = attrs.field(default=0.0, converter=float, validator=_seconds)
    workspace_nbytes: int = attrs.field(default=0, validator=attrs.validators.ge(0))


def _values(items: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(items)


def _ops(items: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(items)


def _updates(items: Iterable[Update]) -> tuple[Update, ...]:
    return tuple(items)


@attrs.frozen(kw_only=True, eq=False)
class Graph:
    """A training step: forward ops, then backward ops, in a valid order.

    Attributes:
        name: for people.
        values: the storages; ops refer to them by index.
        ops: in a valid order, every forward op before every backward op.
        updates: the optimizer's work, if the step includes it.
        rounding_nbytes: granularity of the device allocator; peaks count each storage rounded up to a
            multiple of it.
        conditions: (name, value) pairs on which a plan depends in addition to the ops: mode, autocast,
            kernel flags.
    """

    name: str
    values: tuple[Value, ...] = attrs.field(converter=_values)
    ops: tuple[Op, ...] = attrs.field(converter=_ops)
    updates: tuple[Update, ...] = attrs.field(default=(), converter=_updates)
    rounding_nbytes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    conditions: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_text_pairs)

    def allocated_nbytes(self, value: int) -> int:
        """Bytes of a value as peaks count them: 0 if external, else rounded up as the allocator does."""
        stored = self.values[value]
        return 0 if stored.external else -(-stored.nbytes // self.rounding_nbytes) * self.rounding_nbytes

    def _with_role(self, role: Role) -> tuple[int, ...]:
        return tuple(i for i, value in enumerate(self.values) if value.role is role)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Indices of the values returned to the caller, who holds them until the backward ends."""
        return self._with_role(Role.OUTPUT)

    @cached_property
    def dropped(self) -> tuple[int, ...]:
        """Indices of the values returned to the caller, who drops them before the backward."""
        return self._with_role(Role.DROPPED)

    @cached_property
    def tangents(self) -> tuple[int, ...]:
        """Indices of the tangents."""
        return self._with_role(Role.TANGENT)

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Indices of the gradients to deliver."""
        return self._with_role(Role.GRAD)

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """For each value the op that makes it; None for external and persistent values and tangents.

        Of a graph without switches: a value may have another producer under another decision.
        """
        made: list[int | None] = [None] * len(self.values)
        for i, op in enumerate(self.ops):
            for implementation in op.implementations:
                for value in implementation.outputs:
                    made[value] = i
        return tuple(made)

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Names of the switches, in the order of the ops."""
        return tuple(dict.fromkeys(other.switch for op in self.ops for other in op.alternatives))

    @cached_property
    def time_s(self) -> float:
        """Seconds of running every op once: the unplanned step."""
        return sum(op.first.time_s for op in self.ops)

    @cached_property
    def issue_s(self) -> float:
        """Seconds in which the host issues every op once."""
        return sum(op.first.issue_s for op in self.ops)
