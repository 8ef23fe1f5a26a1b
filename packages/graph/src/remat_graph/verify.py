"""Is a graph well formed, is a schedule valid on it? Public, and cheap enough for every test to call."""

from remat_graph.errors import InvalidGraph
from remat_graph.ir import Graph, Op, Role
from remat_graph.schedule import Schedule
from remat_graph.simulate import simulate


def verify(graph: Graph, schedule: Schedule | None = None) -> None:
    """Check a graph, and a schedule on it if one is given.

    Raises:
        InvalidGraph: a rule of the IR is broken; names the op or value.
        InvalidSchedule: a step cannot be carried out; names the step and what was missing.
    """
    _check_names(graph)
    _check_values(graph)
    _check_order(graph)
    if schedule is not None:
        simulate(graph, schedule)


def _check_names(graph: Graph) -> None:
    for kind, names in (("value", [v.name for v in graph.values]), ("op", [o.name for o in graph.ops])):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidGraph(where=twice, problem=f"two {kind}s have this name; names must be unique")


def _check_values(graph: Graph) -> None:
    count = len(graph.values)
    for value in graph.values:
        for index in (value.of, value.replaces):
            if index is not None and not 0 <= index < count:
                raise InvalidGraph(where=value.name, problem=f"refers to value {index} of {count}")
        if value.replaces is not None and not value.external:
            raise InvalidGraph(where=value.name, problem="replaces another value but is not external")
    for update in graph.updates:
        for index in (update.param, update.grad, *update.states):
            if not 0 <= index < count:
                raise InvalidGraph(where="updates", problem=f"refers to value {index} of {count}")


def _check_order(graph: Graph) -> None:
    made_by: dict[int, str] = {}
    backward_began = ""
    for op in graph.ops:
        if not op.backward and backward_began:
            raise InvalidGraph(where=op.name, problem=f"is a forward op after backward op {backward_began}")
        backward_began = backward_began or (op.name if op.backward else "")
        if op.rerun is not None and not 0 <= op.rerun < len(op.implementations):
            raise InvalidGraph(where=op.name, problem=f"rerun {op.rerun} is not one of its implementations")
        _check_implementations(graph, op, made_by)
        for implementation in op.implementations:
            for value in implementation.outputs:
                if made_by.setdefault(value, op.name) != op.name:
                    name = graph.values[value].name
                    raise InvalidGraph(where=op.name, problem=f"makes {name}, which {made_by[value]} makes")


def _check_implementations(graph: Graph, op: Op, made_by: dict[int, str]) -> None:
    for implementation in op.implementations:
        for value in (*implementation.inputs, *implementation.outputs):
            if not 0 <= value < len(graph.values):
                raise InvalidGraph(where=op.name, problem=f"refers to value {value} of {len(graph.values)}")
        for values in (implementation.inputs, implementation.outputs):
            if len(set(values)) < len(values):
                raise InvalidGraph(where=op.name, problem="names a value twice")
        for value in implementation.inputs:
            stored = graph.values[value]
            if value not in made_by and not (
                stored.external or stored.role is Role.TANGENT or stored.home is not None
            ):
                raise InvalidGraph(where=op.name, problem=f"reads {stored.name} before anything makes it")
            if stored.role is Role.TANGENT and not op.backward:
                raise InvalidGraph(where=op.name, problem=f"is a forward op that reads tangent {stored.name}")
        for output, source in implementation.reuses:
            if output not in implementation.outputs or source not in implementation.inputs:
                raise InvalidGraph(where=op.name, problem="reuses storages that it does not make or read")
            if graph.values[output].nbytes != graph.values[source].nbytes:
                raise InvalidGraph(where=op.name, problem="reuses a storage of another size")
