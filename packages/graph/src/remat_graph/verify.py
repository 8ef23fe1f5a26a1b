"""Check that a graph is well formed and that a schedule is valid on it; cheap enough for every test."""

from collections import Counter
from typing import NoReturn

from remat_graph.errors import InvalidGraph
from remat_graph.ir import MOST_NBYTES, Graph, Implementation, Op, Role
from remat_graph.schedule import Schedule
from remat_graph.simulator.simulate import simulate
from remat_graph.switches.data_flow import DataFlow


def verify(graph: Graph, schedule: Schedule | None = None) -> None:
    """Check a graph, and a schedule on it if one is given.

    Raises:
        InvalidGraph: a rule of the IR is broken; the message names the op or value.
        InvalidSchedule: a step cannot be carried out; the message names the step and what was missing.
    """
    _check_names(graph)
    _check_sizes(graph)
    _check_values(graph)
    _check_updates(graph)
    _check_dropped(graph)
    _OpChecker(graph).check()
    _check_data_flow(graph)
    if schedule is not None:
        simulate(graph, schedule)


def _fail(where: str, problem: str) -> NoReturn:
    raise InvalidGraph(where=where, problem=problem)


def _check_names(graph: Graph) -> None:
    for kind, names in (("value", [v.name for v in graph.values]), ("op", [o.name for o in graph.ops])):
        if len(set(names)) < len(names):
            twice, _ = Counter(names).most_common(1)[0]
            _fail(twice, f"two {kind}s have this name; names must be unique")


def _check_sizes(graph: Graph) -> None:
    total = sum(map(graph.allocated_nbytes, range(len(graph.values))))
    total += max((i.workspace_nbytes for op in graph.ops for i in op.implementations), default=0)
    if total > MOST_NBYTES:
        _fail(graph.name or "graph", f"holds {total:,} bytes in all; at most {MOST_NBYTES:,} can be counted")


def _check_values(graph: Graph) -> None:
    replaced: set[int] = set()
    for value in graph.values:
        for link in (value.of, value.replaces):
            if link is not None and not 0 <= link < len(graph.values):
                _fail(value.name, f"refers to value {link} of {len(graph.values)}")
        if value.replaces is None:
            continue
        if not (value.external and graph.values[value.replaces].external):
            _fail(value.name, "replaces another value, but the two are not both external")
        if value.replaces in replaced or graph.values[value.replaces] is value:
            _fail(value.name, "replaces a version that another value replaces already")
        replaced.add(value.replaces)


def _check_updates(graph: Graph) -> None:
    seen: set[int] = set()
    for update in graph.updates:
        for value in (update.param, update.grad, *update.states):
            if not 0 <= value < len(graph.values):
                _fail("updates", f"refers to value {value} of {len(graph.values)}")
        name = graph.values[update.param].name
        if graph.values[update.grad].role is not Role.GRAD:
            _fail(name, f"its update reads {graph.values[update.grad].name}, which is not a gradient")
        for value in (update.param, *update.states):
            if value in seen:
                _fail(graph.values[value].name, "two updates change it; only one may")
            seen.add(value)


def _check_dropped(graph: Graph) -> None:
    """Outputs that the caller drops live until the forward ends: its last op in any order reads them."""
    forward = [op for op in graph.ops if not op.backward]
    for value in graph.dropped:
        if not forward or forward[-1].rerun is not None or value not in forward[-1].first.inputs:
            _fail(graph.values[value].name, "is returned, but not read by a last forward op that runs once")
    needed: set[int] = set()
    for op in reversed(forward if graph.dropped else []):
        if op is not forward[-1] and needed.isdisjoint(op.first.outputs):
            _fail(op.name, "may run after the forward's last op, which reads what the caller drops")
        needed.update(op.first.inputs)


def _check_data_flow(graph: Graph) -> None:
    """All switches off, and each switch alone, is a graph in which every value is made before it is read."""
    flow = DataFlow(graph)
    for on in ((), *((switch,) for switch in graph.switches)):
        if (broken := flow.check(on)) is not None:
            _fail(broken.where, broken.problem + (f", with {on[0]!r} on" if on else ""))


class _OpChecker:
    """Check each op by itself, with all of its implementations."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def check(self) -> None:
        backward_began = ""
        for op in self.graph.ops:
            if not op.backward and backward_began:
                _fail(op.name, f"is a forward op after backward op {backward_began}")
            backward_began = backward_began or (op.name if op.backward else "")
            if op.rerun is not None and not 0 <= op.rerun < len(op.implementations):
                _fail(op.name, f"rerun {op.rerun} is not one of its implementations")
            self.check_alternatives(op)
            for implementation in op.implementations:
                self.check_indices(op, implementation)
                self.check_roles(op, implementation)
                self.check_reuses(op, implementation)

    def check_alternatives(self, op: Op) -> None:
        names = [other.switch for other in op.alternatives]
        if len(set(names)) < len(names):
            _fail(op.name, "has two alternatives for one switch")
        for other in op.alternatives:
            for run in (other.first, other.again):
                if run is not None and not 0 <= run < len(op.implementations):
                    _fail(op.name, f"alternative {other.switch!r} has no implementation {run}")
            if other.first in (0, op.rerun) or not other.switch:
                _fail(op.name, f"alternative {other.switch!r} needs a name and a first run of its own")

    def check_indices(self, op: Op, implementation: Implementation) -> None:
        for value in (*implementation.inputs, *implementation.outputs):
            if not 0 <= value < len(self.graph.values):
                _fail(op.name, f"refers to value {value} of {len(self.graph.values)}")
        for values in (implementation.inputs, implementation.outputs):
            if len(set(values)) < len(values):
                _fail(op.name, "names a value twice")

    def check_roles(self, op: Op, implementation: Implementation) -> None:
        for value in implementation.inputs:
            stored = self.graph.values[value]
            if stored.role is Role.TANGENT and not op.backward:
                _fail(op.name, f"is a forward op that reads tangent {stored.name}")
        for value in implementation.outputs:
            stored = self.graph.values[value]
            if stored.role is Role.TANGENT or stored.placement is not None:
                _fail(op.name, f"makes {stored.name}, which exists before the step")

    def check_reuses(self, op: Op, implementation: Implementation) -> None:
        inputs, outputs = frozenset(implementation.inputs), frozenset(implementation.outputs)
        for output, source in implementation.reuses:
            if output not in outputs or source not in inputs:
                _fail(op.name, "reuses storages that it does not make or read")
            if self.graph.values[output].nbytes != self.graph.values[source].nbytes:
                _fail(op.name, "reuses a storage of another size")
