"""A step with all that training holds: parameters and optimizer states as values that persist and can move.

A captured graph reads parameters as the caller's, at no cost. Here they become values with a home, the states
of the optimizer are added, and each parameter gets its update. The values of the captured graph keep their
indices.
"""

from collections.abc import Collection, Iterable, Sequence

import attrs

from remat_graph.ir import Graph, Placement, Role, Update, Value


@attrs.frozen(kw_only=True)
class Optimized:
    """What the optimizer does with one parameter.

    Attributes:
        param: index of the parameter.
        states: (name, bytes) of what it keeps for it.
        device_time_s: seconds of its update on the device.
        cpu_time_s: seconds of its update on the CPU.
        workspace_nbytes: scratch of its update on the device.
    """

    param: int
    states: tuple[tuple[str, int], ...] = ()
    device_time_s: float = 0.0
    cpu_time_s: float = 0.0
    workspace_nbytes: int = 0


def training_graph(graph: Graph, optimized: Iterable[Optimized]) -> Graph:
    """The captured step of a model as a step of its training, everything placed on the device.

    Args:
        graph: as captured: parameters are external.
        optimized: parameters that the optimizer updates; those without a gradient in this graph are not
            updated, but their states are there all the same.
    """
    values = [_persistent(value) if value.role is Role.PARAM else value for value in graph.values]
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


def _persistent(value: Value) -> Value:
    return attrs.evolve(value, external=False, placement=Placement.DEVICE)


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
    """The same graph where every parameter has a ``.grad`` already, which lies where its parameter does.

    To be judged with `Grads.ACCUMULATE`: the gradients that the step makes are added to those, and go.
    """
    there = [
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
    return attrs.evolve(graph, values=(*graph.values, *there))


def persistent(graph: Graph, home: Placement) -> Sequence[int]:
    """Indices of the values that persist and are at home there."""
    return [i for i, value in enumerate(graph.values) if value.placement is home]
