"""Decide switches: graphs without any, on which every solver and bound works, or with fewer of them.

A switch names the alternatives of several ops that are in force together (`Op.alternatives`). A schedule must
agree with itself: all ops of a switch run by their alternatives, or none does. `specialize` decides all
switches; a schedule of the graph that it makes is one of the original, after `Specialized.restore`.
"""

from collections import defaultdict
from collections.abc import Iterable

import attrs

from remat_graph.ir import Graph, Implementation, Op
from remat_graph.schedule import Compute, Schedule, Step


@attrs.frozen(kw_only=True)
class Void:
    """An op that runs nothing under a decision, so that the decided graph lacks it.

    Attributes:
        run: the step of the original graph.
        backward: as the op's.
        before: index, in the decided graph, of the next op of the same direction; None after the last.
    """

    run: Compute
    backward: bool
    before: int | None


@attrs.frozen(kw_only=True, eq=False)
class Specialized:
    """A graph in which all switches are decided.

    Attributes:
        graph: without alternatives, without the ops that run nothing, and without the values at the end that
            nothing makes. The other values have the indices of the original.
        on: the switches that are on.
        ops: per op its index in the original.
        numbers: per op the index of each implementation in the original.
        voids: the ops of the original that run nothing, in its order.
    """

    graph: Graph
    on: frozenset[str]
    ops: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    voids: tuple[Void, ...]

    def restore(self, schedule: Schedule) -> Schedule:
        """The same schedule for the original graph; an op that runs nothing comes before the next op."""
        last = len(schedule.steps)
        end = last if schedule.end is None else schedule.end
        first_run: dict[int | None, int] = {}
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                first_run.setdefault(step.op, position)
        voids: dict[tuple[int, bool], list[Step]] = defaultdict(list)
        for void in self.voids:
            position = first_run.get(void.before, end if void.backward else schedule.boundary)
            voids[position, void.backward].append(void.run)
        steps: list[Step] = []
        boundary = new_end = 0
        for position in range(last + 1):
            steps += voids.get((position, False), ())
            if position == schedule.boundary:
                boundary = len(steps)
            steps += voids.get((position, True), ())
            if position == end:
                new_end = len(steps)
            if position < last:
                steps.append(self._restored(schedule.steps[position]))
        return Schedule(steps, boundary, None if schedule.end is None else new_end)

    def _restored(self, step: Step) -> Step:
        if not isinstance(step, Compute):
            return step
        return Compute(self.ops[step.op], self.numbers[step.op][step.implementation])


def specialize(graph: Graph, on: Iterable[str]) -> Specialized:
    """Turn these switches on and all others off.

    Raises:
        ValueError: no such switch, or two of them change the same op.
    """
    chosen, known = _switches_of(graph, on), frozenset(graph.switches)
    ops: list[Op] = []
    places: list[int] = []
    numbers: list[tuple[int, ...]] = []
    voids: list[tuple[int, int, int]] = []  # op, implementation, place of the next op
    for i, op in enumerate(graph.ops):
        decided, runs = _decided(op, chosen, known)
        if op.alternatives and runs_nothing(decided.first):
            voids.append((i, runs[0], len(ops)))
            continue
        ops.append(decided)
        places.append(i)
        numbers.append(runs)
    return Specialized(
        graph=attrs.evolve(graph, ops=ops, values=graph.values[: count_of_values(graph, ops)]),
        on=chosen,
        ops=tuple(places),
        numbers=tuple(numbers),
        voids=tuple(_void(graph, ops, *void) for void in voids),
    )


def decide(graph: Graph, on: Iterable[str], off: Iterable[str]) -> Graph:
    """Turn some switches on and some off; the others stay switches.

    For bounds: an op that runs nothing then is gone, and a value that no op makes any more has no bytes. The
    other values have the indices of the original.

    Raises:
        ValueError: no such switch, or two that are on change the same op.
    """
    chosen = _switches_of(graph, on)
    known = chosen | _switches_of(graph, off)
    ops = []
    for op in graph.ops:
        decided, _ = _decided(op, chosen, known)
        if decided.alternatives or not (op.alternatives and runs_nothing(decided.first)):
            ops.append(decided)
    gone = _made_by(graph.ops) - _made_by(ops)
    values = [
        attrs.evolve(value, nbytes=0) if v in gone else value
        for v, value in enumerate(graph.values[: count_of_values(graph, ops)])
    ]
    return attrs.evolve(graph, ops=ops, values=values)


def _switches_of(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    found = frozenset(names)
    unknown = found.difference(graph.switches)
    if unknown:
        raise ValueError(f"no switch {min(unknown)!r}; there are {len(graph.switches)}")
    return found


def runs_nothing(run: Implementation) -> bool:
    """Whether an implementation neither reads nor makes anything nor takes time."""
    costs = (run.time_s, run.issue_s, run.workspace_nbytes)
    return not (run.inputs or run.outputs or any(costs))


def _void(graph: Graph, ops: list[Op], op: int, implementation: int, place: int) -> Void:
    backward = graph.ops[op].backward
    follows = place < len(ops) and ops[place].backward == backward
    return Void(run=Compute(op, implementation), backward=backward, before=place if follows else None)


def count_of_values(graph: Graph, ops: list[Op]) -> int:
    """How many values to keep: all but those at the end that only other decisions make."""
    if len(ops) == len(graph.ops) and not graph.switches:
        return len(graph.values)
    elsewhere = _made_by(graph.ops) - _made_by(ops)
    count = len(graph.values)
    while count and count - 1 in elsewhere and not graph.values[count - 1].external:
        count -= 1
    return count


def _made_by(ops: Iterable[Op]) -> set[int]:
    return {v for op in ops for run in op.implementations for v in run.outputs}


def family_of(switch: str) -> str:
    """The family of a switch: its name up to the first dot."""
    return switch.partition(".")[0]


def switches_on(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """The switches that a schedule has on."""
    runs = set(schedule.computes())
    return frozenset(
        other.switch
        for i, op in enumerate(graph.ops)
        for other in op.alternatives
        if Compute(i, other.first) in runs
    )


def _decided(op: Op, on: frozenset[str], known: frozenset[str]) -> tuple[Op, tuple[int, ...]]:
    """An op where of the `known` switches those `on` are, and its implementations' places in the original."""
    if not op.alternatives:
        return op, tuple(range(len(op.implementations)))
    forces = [other for other in op.alternatives if other.switch in on]
    if len(forces) > 1:
        raise ValueError(f"{op.name} is changed by {forces[0].switch!r} and by {forces[1].switch!r}")
    undecided = [other for other in op.alternatives if other.switch not in known]
    if undecided and not forces:
        return attrs.evolve(op, alternatives=undecided), tuple(range(len(op.implementations)))
    first, again = (forces[0].first, forces[0].again) if forces else (0, op.rerun)
    numbers = (first,) if again in (None, first) else (first, again)
    rerun = None if again is None else len(numbers) - 1
    implementations = tuple(op.implementations[n] for n in numbers if n is not None)
    return (
        attrs.evolve(op, implementations=implementations, rerun=rerun, alternatives=()),
        tuple(n for n in numbers if n is not None),
    )
