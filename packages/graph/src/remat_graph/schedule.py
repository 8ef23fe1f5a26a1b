"""Describe a schedule: the steps of one forward and backward, made by hand or from a list of op indices."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import index

import attrs

from remat_graph.errors import InvalidSchedule
from remat_graph.ir import Graph, Role


class Lane(StrEnum):
    """A queue of work; the lanes run concurrently."""

    COMPUTE = "compute"
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    CPU_OPTIMIZER = "cpu_optimizer"


@attrs.frozen
class Compute:
    """Run an op; `implementation` indexes `Op.implementations`."""

    op: int
    implementation: int = 0


@attrs.frozen
class Free:
    """Free the device storage of a value."""

    value: int


@attrs.frozen
class Deliver:
    """Deliver a gradient to autograd; from then on the step cannot read it."""

    value: int


@attrs.frozen
class Transfer:
    """A copy of one value between device and host; `lane` (TO_HOST or TO_DEVICE) is its direction."""

    value: int
    lane: Lane = attrs.field(converter=Lane, validator=attrs.validators.in_((Lane.TO_HOST, Lane.TO_DEVICE)))


@attrs.frozen
class Start:
    """Queue a transfer on its lane; its destination bytes are held from now on."""

    transfer: Transfer


@attrs.frozen
class Wait:
    """Block the compute lane until the transfer is done."""

    transfer: Transfer


@attrs.frozen
class FreeHost:
    """Free the host copy of a value."""

    value: int


@attrs.frozen
class OptimizerStep:
    """Update a parameter (or a chunk) on the compute lane or on the CPU."""

    value: int
    lane: Lane = attrs.field(
        converter=Lane, validator=attrs.validators.in_((Lane.COMPUTE, Lane.CPU_OPTIMIZER))
    )


Step = Compute | Free | Deliver | Start | Wait | FreeHost | OptimizerStep


def _steps(items: Iterable[Step]) -> tuple[Step, ...]:
    return tuple(items)


@attrs.frozen
class Schedule:
    """Steps in order.

    Attributes:
        steps: the steps.
        boundary: index of the first backward step; the tangents become live there.
        end: index of the first step that runs in the optimizer's own call; None if the backward ends with
            the last step.
    """

    steps: tuple[Step, ...] = attrs.field(converter=_steps)
    boundary: int
    end: int | None = None

    @classmethod
    def from_order(cls, graph: Graph, order: Iterable[int]) -> "Schedule":
        """Build the schedule that runs the op indices of `order` and frees every value after its last use.

        A first run uses the op's first implementation, a repeat its `rerun` one. Freeing early is never
        worse, so an order determines the schedule where nothing moves. A gradient is delivered after its last
        use and after the last use of its parameter: a hook of the optimizer may change the parameter when the
        gradient is delivered.

        Raises:
            InvalidSchedule: an index is not an op's, or an op that may run only once comes twice.
        """
        runs = _runs(graph, order)
        after = _last_uses(graph, runs)
        first_backward = _boundary(graph, runs)
        steps: list[Step] = []
        boundary = 0
        for position, run in enumerate(runs):
            if position == first_backward:
                boundary = len(steps)
            steps.append(run)
            steps.extend(after[position])
        return cls(steps, boundary if first_backward < len(runs) else len(steps))

    @classmethod
    def unplanned(cls, graph: Graph) -> "Schedule":
        """The schedule of the unplanned step: every op once in trace order, each value freed early."""
        return cls.from_order(graph, range(len(graph.ops)))

    @property
    def order(self) -> tuple[int, ...]:
        """Op indices in running order, repeats included."""
        return tuple(step.op for step in self.computes())

    def computes(self) -> Iterator[Compute]:
        """The `Compute` steps in order."""
        return (step for step in self.steps if isinstance(step, Compute))


def _runs(graph: Graph, order: Iterable[int]) -> list[Compute]:
    seen: set[int] = set()
    runs = []
    for position, number in enumerate(map(index, order)):  # numpy's integers become ints
        if not 0 <= number < len(graph.ops):
            raise InvalidSchedule(step=position, problem=f"no op {number}: the graph has {len(graph.ops)}")
        op = graph.ops[number]
        if number in seen and op.rerun is None:
            raise InvalidSchedule(step=position, problem=f"{op.name} may run only once, but it comes again")
        runs.append(Compute(number, op.rerun if number in seen and op.rerun is not None else 0))
        seen.add(number)
    return runs


def _boundary(graph: Graph, runs: list[Compute]) -> int:
    """Position after the last forward op that runs for the first time."""
    first_runs: dict[int, int] = {}
    for position, run in enumerate(runs):
        first_runs.setdefault(run.op, position)
    return max((at + 1 for op, at in first_runs.items() if not graph.ops[op].backward), default=0)


def _last_uses(graph: Graph, runs: list[Compute]) -> list[list[Step]]:
    """For each position, the frees and deliveries that follow it; found in one pass from the end."""
    after: list[list[Step]] = [[] for _ in runs]
    owner_last_use: dict[int, int] = {}
    owners = {graph.values[grad].of for grad in graph.gradients}
    last_touch: dict[int, int] = {}
    needed: set[int] = set()
    for position in range(len(runs) - 1, -1, -1):
        run = runs[position]
        implementation = graph.ops[run.op].implementations[run.implementation]
        for value in implementation.outputs:
            stored = graph.values[value]
            if stored.role is Role.GRAD:
                last_touch.setdefault(value, position)
            elif stored.external or stored.role is Role.OUTPUT:
                continue
            elif value in needed:
                needed.discard(value)
            else:
                after[position].append(Free(value))
        for value in implementation.inputs:
            stored = graph.values[value]
            if value in owners:
                owner_last_use.setdefault(value, position)
            if stored.role is Role.GRAD:
                last_touch.setdefault(value, position)
            elif stored.external or stored.role is Role.OUTPUT or stored.placement is not None:
                continue
            elif value not in needed:
                needed.add(value)
                after[position].append(Free(value))
    for grad, position in sorted(last_touch.items()):
        owner = graph.values[grad].of
        held_by_owner = owner_last_use.get(owner, 0) if owner is not None else 0
        after[max(position, held_by_owner)].append(Deliver(grad))
    return after
