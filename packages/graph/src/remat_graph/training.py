"""Extend a captured step to a training step: parameters and optimizer states become values that can move.

In a captured graph parameters are external and count 0 bytes. Here they get a placement, the states of the
optimizer are added, and each parameter gets its update. The values of the captured graph keep their indices.
"""

from collections.abc import Collection, Iterable, Sequence

import attrs

from remat_graph.ir import Graph, Placement, Role, Update, Value


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


def persistent(graph: Graph, placement: Placement) -> Sequence[int]:
    """Indices of the persistent values with this placement."""
    return [i for i, value in enumerate(graph.values) if value.placement is placement]
