"""What a step holds at one moment: bytes by value, and by layer."""

from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from remat_facade.report.allocations import freed_after, stays
from remat_graph import Compute, Deliver, Free, Grads, Graph, Op, Placement, Role, Schedule, simulate
from remat_graph.layers.names import Patterns
from remat_graph.layers.summary import OUTSIDE
from remat_graph.training import persistent

GRADIENTS, RETURNED, PERSISTENT, WORKSPACE = (
    "gradients",
    "outputs and tangents",
    "parameters and states",
    "workspace of the op",
)
"""Names of what belongs to no layer."""

_APART = {
    Role.GRAD: GRADIENTS,
    Role.OUTPUT: RETURNED,
    Role.TANGENT: RETURNED,
    Role.PARAM: PERSISTENT,
    Role.OPTIMIZER_STATE: PERSISTENT,
}


@attrs.frozen(kw_only=True)
class Held:
    """The device memory at one moment.

    Attributes:
        place: the op that runs then, for people.
        values: bytes by index of the value, as peaks count them.
        workspace_nbytes: workspace of the op.
    """

    place: str
    values: Mapping[int, int]
    workspace_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.values.values()) + self.workspace_nbytes


def held_at_peak(graph: Graph, schedule: Schedule, grads: Grads = Grads.NEW) -> Held:
    """What a schedule without transfers holds when it peaks."""
    return held_during(graph, schedule, simulate(graph, schedule, grads=grads).peak_step, grads)


def held_during(graph: Graph, schedule: Schedule, position: int, grads: Grads = Grads.NEW) -> Held:
    """What a schedule holds while one of its steps runs, by the memory rule of the referee.

    Args:
        graph: the graph.
        schedule: a valid schedule without transfers.
        position: of the step; the number of steps for the end.
        grads: the state of ``.grad``, new or present.
    """
    held = {v: graph.allocated_nbytes(v) for v in persistent(graph, Placement.DEVICE)}
    delivered: set[int] = set()
    place, workspace_nbytes, copies = "the end of the step", 0, Counter[int]()
    for current in range(position + 1):
        if current == schedule.boundary:
            held |= {v: graph.allocated_nbytes(v) for v in graph.tangents}
        if current == len(schedule.steps):
            break
        match schedule.steps[current]:
            case Compute(op, number):
                run = graph.ops[op].implementations[number]
                made = [v for v in run.outputs if not graph.values[v].external]
                # A repeat that makes a pinned value makes a copy, which is freed when the op ends.
                copies = Counter({v: graph.allocated_nbytes(v) for v in made if v in held.keys() | delivered})
                dying = freed_after(schedule, current) & held.keys()
                for v in made:
                    if v not in copies:
                        sources = [s for m, s in run.reuses if m == v and s in dying][:1]
                        dying.difference_update(sources)
                        held[v] = held.pop(sources[0]) if sources else graph.allocated_nbytes(v)
                place, workspace_nbytes = graph.ops[op].place, run.workspace_nbytes
            case Free(value) if current < position:
                held.pop(value, None)  # an output may have taken over its storage
            case Deliver(value) if current < position:
                delivered.add(value)
                if grads is Grads.PRESENT and not stays(graph, value, grads):
                    held.pop(value)
    runs = position < len(schedule.steps) and isinstance(schedule.steps[position], Compute)
    return Held(
        place=place,
        values=dict(Counter(held) + copies) if runs else held,
        workspace_nbytes=workspace_nbytes if runs else 0,
    )


def makers(graph: Graph) -> dict[int, Op]:
    """The op that makes each value, with all switches off if it makes the value then."""
    found: dict[int, Op] = {}
    for op in graph.ops:
        for run in op.implementations:
            for v in run.outputs:
                if v not in found or v in op.first.outputs:
                    found[v] = op
    return found


def grouping(graph: Graph) -> Callable[[Op], str]:
    """The name of an op's group: the pattern of its layer, or what it calls if no op has a layer."""
    layers = {op.layer for op in graph.ops}
    if not any(layers):
        return lambda op: op.target.removeprefix("aten.").partition(".")[0]
    pattern_of = Patterns(layers)
    return lambda op: pattern_of(op.layer) or OUTSIDE


def held_by_layer(graph: Graph, held: Held) -> Counter[str]:
    """Bytes by the layer that makes them; gradients, outputs and workspace have names of their own."""
    group, made_by = grouping(graph), makers(graph)
    found: Counter[str] = Counter({WORKSPACE: held.workspace_nbytes})
    for v, nbytes in held.values.items():
        maker = made_by.get(v)
        found[_APART.get(graph.values[v].role) or (group(maker) if maker else OUTSIDE)] += nbytes
    return found


def repeats_by_layer(graph: Graph, schedule: Schedule) -> dict[str, tuple[int, float]]:
    """Number of repeated runs by layer, and their seconds."""
    group, found = grouping(graph), dict[str, tuple[int, float]]()
    seen: set[int] = set()
    for run in schedule.computes():
        op = graph.ops[run.op]
        if run.op in seen:
            count, seconds = found.get(group(op), (0, 0.0))
            found[group(op)] = count + 1, seconds + op.implementations[run.implementation].time_s
        seen.add(run.op)
    return found
