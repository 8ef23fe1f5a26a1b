"""Switches: parts of a step that can run in another way, and graphs in which that is decided.

A switch names the alternatives of several ops that are in force together (`Op.alternatives`). A schedule must
agree with itself: all ops of a switch run by their alternatives, or none does. `specialize` decides all
switches and gives a graph without any, on which every solver and bound works; its schedules are translated
back. `relaxed` decides none: it allows more than any decision does, so what bounds it bounds all of them.
"""

from collections.abc import Iterable

import attrs

from remat_graph.ir import Alternative, Graph, Implementation, Op
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


def relaxed(graph: Graph) -> Graph:
    """A graph without switches in which every decision's schedule is possible, as fast and as small.

    Each op reads what it reads in all of its ways, makes what it makes in all of them, takes the least time
    and workspace, and may overwrite what any of them may.
    """
    return attrs.evolve(graph, ops=tuple(_relaxed(op) for op in graph.ops))


def _relaxed(op: Op) -> Op:
    if not op.alternatives:
        return op
    base = Alternative(switch="", first=0, again=op.rerun)
    ways = (base, *op.alternatives)
    first = _common([op.implementations[way.first] for way in ways])
    repeats = [op.implementations[way.again] for way in ways if way.again is not None]
    runs = (first, _common(repeats)) if repeats else (first,)
    return attrs.evolve(op, implementations=runs, rerun=len(runs) - 1 if repeats else None, alternatives=())


def _common(ways: list[Implementation]) -> Implementation:
    inputs = set.intersection(*(set(way.inputs) for way in ways))
    outputs = set.intersection(*(set(way.outputs) for way in ways))
    reuses = dict.fromkeys(pair for way in ways for pair in way.reuses)
    return Implementation(
        inputs=[v for v in ways[0].inputs if v in inputs],
        outputs=[v for v in ways[0].outputs if v in outputs],
        time_s=min(way.time_s for way in ways),
        issue_s=min(way.issue_s for way in ways),
        workspace_nbytes=min(way.workspace_nbytes for way in ways),
        reuses=[(made, source) for made, source in reuses if made in outputs and source in inputs],
    )
