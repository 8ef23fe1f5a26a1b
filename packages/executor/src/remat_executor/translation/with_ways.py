"""Add other ways to run the ops of a translated step: one switch a way."""

from collections.abc import Iterable

import attrs
from torch.fx import Node

from remat_executor.translation.recipes import RunKernel
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change, Substitution
from remat_graph import Alternative, Graph, Implementation, Op, Role


def with_ways(translation: Translation, ways: Iterable[Substitution]) -> Translation:
    """The translation with an alternative for each change of each way that the graph allows.

    A way is left out if what it does not make is read by an op that it does not change or is delivered, if it
    reads a tensor of the caller that the step overwrites, or if it changes an op that is no plain call.
    """
    found = list(translation.graph.ops)
    kernels: dict[tuple[int, int], RunKernel] = dict(translation.kernels)
    overwritten = {value.replaces for value in translation.graph.values}
    for way in ways:
        changed = _alternatives(translation, way)
        if changed is None or any(overwritten.intersection(run.inputs) for _, run, _ in changed):
            continue
        if not _sufficient(translation.graph, changed):
            continue
        for i, run, change in changed:
            number = len(found[i].implementations)
            # A way of an op whose kernel may vary is not repeated either.
            again = None if found[i].rerun is None and change.kernel is not None else number
            other = Alternative(switch=way.name, first=number, again=again, exact=way.exact)
            found[i] = attrs.evolve(
                found[i],
                implementations=(*found[i].implementations, run),
                alternatives=(*found[i].alternatives, other),
            )
            kernels[i, number] = RunKernel(change)
    graph = attrs.evolve(translation.graph, ops=tuple(found))
    return attrs.evolve(translation, graph=graph, kernels=kernels)


_Changed = list[tuple[int, Implementation, Change]]


def _alternatives(translation: Translation, way: Substitution) -> _Changed | None:
    """The new implementations; None if a node is no op, or reads what is no value."""
    changed: _Changed = []
    for change in way.changes:
        op = translation.op_of.get(change.node)
        reads = [_value(translation, node) for node in change.reads]
        if op is None or None in reads:
            return None
        changed.append((op, _implementation(translation, op, change), change))
    return changed


def _implementation(translation: Translation, op: int, change: Change) -> Implementation:
    if change.kernel is None:
        return Implementation(inputs=(), outputs=())
    graph = translation.graph
    reads = [value for node in change.reads if (value := _value(translation, node)) is not None]
    outputs = graph.ops[op].first.outputs
    reuses: list[tuple[int, int]] = []
    if change.over is not None and len(outputs) == 1:
        source = reads[change.reads.index(change.over)]
        if _may_overwrite(graph, source, outputs[0]) and reads.count(source) == 1:
            reuses.append((outputs[0], source))
    return Implementation(
        inputs=tuple(dict.fromkeys(reads)),
        outputs=outputs,
        reuses=reuses,
        workspace_nbytes=change.workspace_nbytes,
    )


def _may_overwrite(graph: Graph, source: int, output: int) -> bool:
    # A tangent belongs to autograd, which may pass it on, so it is never written.
    stored = graph.values[source]
    foreign = stored.external or stored.role is Role.TANGENT
    return not foreign and stored.nbytes == graph.values[output].nbytes


def _sufficient(graph: Graph, changed: _Changed) -> bool:
    """Whether all values that these changes leave unmade are read by nothing and not delivered."""
    after: dict[int, Implementation] = {i: run for i, run, _ in changed}
    made = {v for i, op in enumerate(graph.ops) for v in after.get(i, op.first).outputs}
    gone = {v for i in after for v in graph.ops[i].first.outputs} - made
    if any(graph.values[v].pinned or graph.values[v].external for v in gone):
        return False
    for i, op in enumerate(graph.ops):
        runs = [after[i]] if i in after else _own(op)
        if any(not gone.isdisjoint(run.inputs) for run in runs):
            return False
    return True


def _own(op: Op) -> list[Implementation]:
    """The implementations of an op that no alternative uses."""
    return [op.first] if op.rerun is None else [op.first, op.implementations[op.rerun]]


def _value(translation: Translation, node: Node) -> int | None:
    """The value whose storage a node shows."""
    base = translation.base_of.get(node)
    return None if base is None else translation.value_of.get(base)
