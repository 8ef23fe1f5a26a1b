"""Group the parameters of a training step in the order of the forward, with the data that placement needs."""

from collections.abc import Sequence

import attrs

from remat_graph import Graph, Role, Update
from remat_solvers.offload.training_problem import first_reads


@attrs.frozen(kw_only=True)
class Param:
    """A parameter that can be placed on the host."""

    index: int  # of its value
    nbytes: int  # its bytes
    grad_nbytes: int  # bytes of its gradient; 0 if it is frozen
    states: tuple[int, ...]  # indices of its optimizer states
    states_nbytes: int  # their bytes
    update: Update | None  # its update, None if it has none
    read_s: float  # seconds of the unplanned forward before it is read
    made_s: float  # seconds of the unplanned backward until its gradient is computed

    @property
    def charge_nbytes(self) -> int:
        """Device bytes that placing it on the host saves throughout the step."""
        return self.nbytes + self.states_nbytes


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """Parameters that the forward reads one after the other, treated as one: sums, and the worst times."""

    params: tuple[Param, ...]
    nbytes: int
    grad_nbytes: int
    states_nbytes: int
    cpu_s: float
    device_s: float
    read_s: float
    made_s: float


def params_of(graph: Graph) -> list[Param]:
    """Parameters with bytes of their own, in the order in which the forward reads them."""
    first = first_reads(graph)
    grads = {graph.values[grad].of: grad for grad in graph.gradients}
    updates = {update.param: update for update in graph.updates}
    states: dict[int, list[int]] = {}
    for index, value in enumerate(graph.values):
        if value.role is Role.OPTIMIZER_STATE and value.of is not None and value.placement is not None:
            states.setdefault(value.of, []).append(index)
    starts_s = _starts_s(graph)
    boundary_s = next((s for s, op in zip(starts_s, graph.ops, strict=False) if op.backward), starts_s[-1])
    made_by = graph.producer
    found = []
    for index, value in enumerate(graph.values):
        if value.role is not Role.PARAM or value.placement is None or not value.nbytes:
            continue
        grad, kept = grads.get(index), tuple(states.get(index, ()))
        maker = None if grad is None else made_by[grad]
        found.append(
            Param(
                index=index,
                nbytes=value.nbytes,
                grad_nbytes=0 if grad is None else graph.values[grad].nbytes,
                states=kept,
                states_nbytes=sum(graph.values[v].nbytes for v in kept),
                update=updates.get(index),
                read_s=min(boundary_s, starts_s[first.get(index, len(graph.ops))]),
                made_s=0.0 if maker is None else max(0.0, starts_s[maker + 1] - boundary_s),
            )
        )
    return sorted(found, key=lambda param: (first.get(param.index, len(graph.ops)), param.index))


def parameter_groups(params: Sequence[Param], most: int) -> list[ParameterGroup]:
    """At most `most` groups of consecutive parameters with about equal bytes."""
    whole = sum(param.charge_nbytes for param in params)
    parts: dict[int, list[Param]] = {}
    passed = 0
    for param in params:
        parts.setdefault(passed * most // max(1, whole), []).append(param)
        passed += param.charge_nbytes
    return [_group(part) for part in parts.values()]


def _group(params: Sequence[Param]) -> ParameterGroup:
    updates = [param.update for param in params if param.update is not None]
    return ParameterGroup(
        params=tuple(params),
        nbytes=sum(param.nbytes for param in params),
        grad_nbytes=sum(param.grad_nbytes for param in params),
        states_nbytes=sum(param.states_nbytes for param in params),
        cpu_s=sum(update.cpu_time_s for update in updates),
        device_s=sum(update.device_time_s for update in updates),
        read_s=min(param.read_s for param in params),
        made_s=max(param.made_s for param in params),
    )


def _starts_s(graph: Graph) -> list[float]:
    """Start time of each op of the unplanned step, and its end."""
    starts = [0.0]
    for op in graph.ops:
        starts.append(starts[-1] + op.first.time_s)
    return starts
