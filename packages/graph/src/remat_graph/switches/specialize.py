"""Decide switches: graphs without any, on which every solver and bound works.

A switch names the alternatives of several ops that are in force together (`Op.alternatives`). A schedule must
agree with itself: all ops of a switch run by their alternatives, or none does. `specialize` decides all
switches; a schedule of the graph that it makes is one of the original, after `Specialized.restore`.
"""

from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph, Op
from remat_graph.schedule import Compute, Schedule, Step


@attrs.frozen(kw_only=True, eq=False)
class Specialized:
    """A graph in which all switches are decided.

    Attributes:
        graph: without alternatives; ops and values have the indices of the original.
        on: the switches that are on.
        numbers: per op the index of each implementation in the original.
    """

    graph: Graph
    on: frozenset[str]
    numbers: tuple[tuple[int, ...], ...]

    def restore(self, schedule: Schedule) -> Schedule:
        """The same schedule for the original graph."""

        def restored(step: Step) -> Step:
            if not isinstance(step, Compute):
                return step
            return Compute(step.op, self.numbers[step.op][step.implementation])

        return attrs.evolve(schedule, steps=map(restored, schedule.steps))


def specialize(graph: Graph, on: Iterable[str]) -> Specialized:
    """Turn these switches on and all others off.

    Raises:
        ValueError: no such switch, or two of them change the same op.
    """
    chosen = frozenset(on)
    unknown = chosen.difference(graph.switches)
    if unknown:
        raise ValueError(f"no switch {min(unknown)!r}; there are {len(graph.switches)}")
    made = [_decided(op, chosen) for op in graph.ops]
    ops = tuple(op for op, _ in made)
    return Specialized(
        graph=attrs.evolve(graph, ops=ops), on=chosen, numbers=tuple(numbers for _, numbers in made)
    )


def family_of(switch: str) -> str:
    """The family of a switch: its name up to the first dot."""
    return switch.partition(".")[0]


def conflicting(graph: Graph, on: Iterable[str]) -> bool:
    """Whether two of these switches change the same op."""
    chosen = frozenset(on)
    return any(sum(other.switch in chosen for other in op.alternatives) > 1 for op in graph.ops)


def switches_on(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """The switches that a schedule has on."""
    runs = set(schedule.computes())
    return frozenset(
        other.switch
        for i, op in enumerate(graph.ops)
        for other in op.alternatives
        if Compute(i, other.first) in runs
    )


def _decided(op: Op, on: frozenset[str]) -> tuple[Op, tuple[int, ...]]:
    if not op.alternatives:
        return op, tuple(range(len(op.implementations)))
    forces = [other for other in op.alternatives if other.switch in on]
    if len(forces) > 1:
        raise ValueError(f"{op.name} is changed by {forces[0].switch!r} and by {forces[1].switch!r}")
    first, again = (forces[0].first, forces[0].again) if forces else (0, op.rerun)
    numbers = (first,) if again in (None, first) else (first, again)
    rerun = None if again is None else len(numbers) - 1
    implementations = tuple(op.implementations[n] for n in numbers if n is not None)
    return (
        attrs.evolve(op, implementations=implementations, rerun=rerun, alternatives=()),
        tuple(n for n in numbers if n is not None),
    )
