"""Change what a captured step is part of: an optimizer that steps, gradients, outputs that the caller drops.

In a captured graph parameters are external and count 0 bytes. Here they get a placement, the states of the
optimizer are added, and each parameter gets its update. The values of the captured graph keep their indices.

Outputs that the caller drops before the backward are held to the end of the forward by an op that runs
nothing and comes last: every other op of the forward is its ancestor, if only by a value of 0 bytes.
"""

from collections.abc import Collection, Iterable, Sequence

import attrs

from remat_graph.ir import Graph, Implementation, Op, Placement, Role, Update, Value


@attrs.frozen(kw_only=True)
class Optimized:
    """A parameter that the optimizer updates.

    Attributes:
        param: index of the parameter.
        states: (name, bytes) of each optimizer state.
        device_time_s: seconds of the update on the device.
        cpu_time_s: seconds of the update on the CPU.
        workspace_nbytes: device bytes that the update holds while it runs on the device.
    """

    param: int
    states: tuple[tuple[str, int], ...] = ()
    device_time_s: float = 0.0
    cpu_time_s: float = 0.0
    workspace_nbytes: int = 0


def training_graph(graph: Graph, optimized: Iterable[Optimized]) -> Graph:
    """The training step of a captured graph, with every persistent value placed on the device.

    Args:
        graph: a captured graph, whose parameters are external.
        optimized: parameters that the optimizer updates; one without a gradient gets states but no update.
    """
    values = [
        attrs.evolve(value, external=False, placement=Placement.DEVICE) if value.role is Role.PARAM else value
        for value in graph.values
    ]
    grad_of = {graph.values[grad].of: grad for grad in graph.gradients}
    updates = []
    for one in optimized:
        states = []
        for name, nbytes in one.states:
            states.append(len(values))
            values.append(
                Value(
                    name=f"{graph.values[one.param].name}.{name}",
                    nbytes=nbytes,
                    role=Role.OPTIMIZER_STATE,
                    of=one.param,
                    placement=Placement.DEVICE,
                )
            )
        if one.param in grad_of:
            updates.append(
                Update(
                    param=one.param,
                    grad=grad_of[one.param],
                    states=tuple(states),
                    device_time_s=one.device_time_s,
                    cpu_time_s=one.cpu_time_s,
                    workspace_nbytes=one.workspace_nbytes,
                )
            )
    return attrs.evolve(graph, values=tuple(values), updates=tuple(updates))


def with_placement(graph: Graph, on_host: Collection[int]) -> Graph:
    """The same graph with these persistent values placed on the host, and all others on the device."""
    values = tuple(
        value
        if value.placement is None
        else attrs.evolve(value, placement=Placement.HOST if i in on_host else Placement.DEVICE)
        for i, value in enumerate(graph.values)
    )
    return attrs.evolve(graph, values=values)


def accumulating(graph: Graph) -> Graph:
    """The same graph with a ``.grad`` from earlier steps for every parameter, placed like the parameter.

    It is simulated with `Grads.ACCUMULATE`: new gradients are added to those and freed.
    """
    accumulated = [
        Value(
            name=f"{graph.values[grad].name}, accumulated",
            nbytes=graph.values[grad].nbytes,
            role=Role.BUFFER,
            of=owner,
            placement=graph.values[owner].placement,
        )
        for grad in graph.gradients
        if (owner := graph.values[grad].of) is not None and graph.values[owner].placement is not None
    ]
    return attrs.evolve(graph, values=(*graph.values, *accumulated))


def with_dropped(graph: Graph, outputs: Collection[int]) -> Graph:
    """The same graph with outputs that the caller drops before the backward.

    Args:
        graph: in which the forward makes these values.
        outputs: indices of values; at least one.

    Returns:
        the graph with one more op, the last of the forward; later ops have the next index.
    """
    place = sum(not op.backward for op in graph.ops)
    values = list(graph.values)
    for value in outputs:
        values[value] = attrs.evolve(values[value], role=Role.DROPPED)
    last = Op(
        name="return_outputs",
        target="return",
        rerun=None,
        implementations=(Implementation(inputs=outputs, outputs=()),),
    )
    ops = (*graph.ops[:place], last, *graph.ops[place:])
    needed, loose = set(outputs), []
    for i in range(place - 1, -1, -1):
        runs = [ops[i].first, *(ops[i].implementations[other.first] for other in ops[i].alternatives)]
        if needed.isdisjoint(set(runs[0].outputs).intersection(*(run.outputs for run in runs))):
            loose.append((i, place))
        needed.update(set(runs[0].inputs).intersection(*(run.inputs for run in runs)))
    return ordered(attrs.evolve(graph, values=tuple(values), ops=ops), loose)


def ordered(graph: Graph, pairs: Iterable[tuple[int, int]]) -> Graph:
    """The same graph in which of each pair of ops the first runs before the second.

    Each first op also makes a value of 0 bytes, which the second reads. The new values have the last indices.

    Args:
        graph: a graph.
        pairs: indices of ops, the first one lower.
    """
    values, ops = list(graph.values), list(graph.ops)
    made: dict[int, int] = {}
    for before, after in pairs:
        if before not in made:
            made[before] = len(values)
            values.append(Value(name=f"{ops[before].name}_ran", nbytes=0))
            runs = [attrs.evolve(r, outputs=(*r.outputs, made[before])) for r in ops[before].implementations]
            ops[before] = attrs.evolve(ops[before], implementations=tuple(runs))
        runs = [attrs.evolve(r, inputs=(*r.inputs, made[before])) for r in ops[after].implementations]
        ops[after] = attrs.evolve(ops[after], implementations=tuple(runs))
    return attrs.evolve(graph, values=tuple(values), ops=tuple(ops))


def persistent(graph: Graph, placement: Placement) -> Sequence[int]:
    """Indices of the persistent values with this placement."""
    return [i for i, value in enumerate(graph.values) if value.placement is placement]
