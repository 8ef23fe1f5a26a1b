"""Memory over time of a schedule, as simulated by the referee: the data of the pictures."""

from collections import Counter, defaultdict

import attrs

from remat_facade.report.allocations import stays
from remat_graph import Compute, Deliver, Grads, Graph, Role, Schedule, simulate
from remat_graph.layers.names import Patterns


@attrs.frozen
class OpRun:
    """One execution of an op: its begin and end, and whether it is a recomputation."""

    op: int
    begin_s: float
    end_s: float
    repeat: bool


@attrs.frozen(kw_only=True)
class Trace:
    """A schedule laid out in time."""

    runs: tuple[OpRun, ...]  # the executions of ops, in order
    held_nbytes: tuple[int, ...]  # peak device bytes during each of them, including workspaces and rounding
    gradient_nbytes: tuple[int, ...]  # the part of these bytes that finished gradients hold
    boundary_s: float  # the time at which the backward begins
    has_times: bool  # False if the graph has no times; each op then takes one second

    @property
    def end_s(self) -> float:
        """The time at which the last op ends."""
        return self.runs[-1].end_s if self.runs else 0.0

    @property
    def peak_nbytes(self) -> int:
        """The peak of the schedule."""
        return max(self.held_nbytes, default=0)

    @property
    def repeats(self) -> tuple[OpRun, ...]:
        """The recomputations."""
        return tuple(run for run in self.runs if run.repeat)


def trace(graph: Graph, schedule: Schedule, grads: Grads = Grads.NEW) -> Trace:
    """Lay a schedule out in time, with the gradients that a state of ``.grad`` leaves in its memory.

    Raises:
        InvalidSchedule: the schedule is invalid.
    """
    during = simulate(graph, schedule, grads=grads).during_nbytes
    has_times = graph.time_s > 0
    runs: list[OpRun] = []
    held: list[int] = []
    gradients: list[int] = []
    seen: set[int] = set()
    clock_s = boundary_s = 0.0
    finished = 0
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            boundary_s = clock_s
        if not isinstance(step, Compute):
            # Memory during a transfer or an optimizer step counts with the op before it.
            if held:
                held[-1] = max(held[-1], during[index])
            if isinstance(step, Deliver) and not stays(graph, step.value, grads):
                finished -= graph.allocated_nbytes(step.value)
            continue
        implementation = graph.ops[step.op].implementations[step.implementation]
        begin_s = clock_s
        clock_s += implementation.time_s if has_times else 1.0
        runs.append(OpRun(step.op, begin_s, clock_s, step.op in seen))
        if step.op not in seen:
            made = (v for v in implementation.outputs if graph.values[v].role is Role.GRAD)
            finished += sum(graph.allocated_nbytes(v) for v in made)
        seen.add(step.op)
        held.append(during[index])
        gradients.append(finished)
    if schedule.boundary >= len(schedule.steps):
        boundary_s = clock_s
    return Trace(
        runs=tuple(runs),
        held_nbytes=tuple(held),
        gradient_nbytes=tuple(gradients),
        boundary_s=boundary_s,
        has_times=has_times,
    )


@attrs.frozen
class Repeated:
    """Number and total time of the recomputations of one kind of op in layers of one pattern."""

    target: str
    layers: str
    count: int
    time_s: float


def repeated_targets(graph: Graph, schedule: Schedule) -> tuple[Repeated, ...]:
    """The recomputed kinds of ops, the most expensive one first."""
    count: Counter[tuple[str, str]] = Counter()
    time_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    shown = trace(graph, schedule)
    names = {op.layer for op in graph.ops}
    deepest = max((name.count(".") + 1 for name in names), default=1)
    pattern_of = Patterns(names, 0, depth=deepest)
    for run in shown.repeats:
        op = graph.ops[run.op]
        kind = op.target, pattern_of(op.layer)
        count[kind] += 1
        time_s[kind] += run.end_s - run.begin_s if shown.has_times else 0.0
    return tuple(
        Repeated(*kind, count[kind], time_s[kind])
        for kind in sorted(count, key=lambda kind: (-time_s[kind], -count[kind], kind))
    )
