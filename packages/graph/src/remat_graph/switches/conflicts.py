"""Find switches that cannot be on together.

Two switches conflict if both change one op, if one leaves a value unmade that an alternative of the other
reads, or if both have a value made, by different ops. A set of switches is possible if no two of it conflict:
an op reads only what its own switch or the graph with all switches off makes, so what a third switch makes
does not help.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations

from remat_graph.ir import Graph
from remat_graph.switches.data_flow import DataFlow

Conflicts = Mapping[str, frozenset[str]]
"""For each switch, those that it cannot be on with."""


def conflicts(graph: Graph) -> Conflicts:
    """The conflicts of each switch of a valid graph; little work beyond the switches' own ops."""
    flow = DataFlow(graph)
    found: dict[str, set[str]] = {switch: set() for switch in graph.switches}
    pairs: set[tuple[str, str]] = set()
    for op in graph.ops:
        for one, two in combinations([other.switch for other in op.alternatives], 2):
            found[one].add(two)
            found[two].add(one)
    for value, (differing, touching) in _by_value(flow).items():
        del value
        pairs |= {(min(one, two), max(one, two)) for one in differing for two in touching if one != two}
    for one, two in sorted(pairs):
        if two not in found[one] and flow.check((one, two)) is not None:
            found[one].add(two)
            found[two].add(one)
    return {switch: frozenset(others) for switch, others in found.items()}


def conflicting(graph: Graph, on: Iterable[str]) -> bool:
    """Whether two of these switches cannot be on together."""
    chosen, found = frozenset(on), conflicts(graph)
    return any(not chosen.isdisjoint(found[switch]) for switch in chosen)


def compatible(found: Conflicts, switches: Iterable[str]) -> frozenset[str]:
    """These switches without those that conflict with an earlier one."""
    kept: set[str] = set()
    for switch in switches:
        if kept.isdisjoint(found[switch]):
            kept.add(switch)
    return frozenset(kept)


def _by_value(flow: DataFlow) -> dict[int, tuple[set[str], set[str]]]:
    """Per value the switches that change how it is made, and those whose alternatives read or make it."""
    by_value: dict[int, tuple[set[str], set[str]]] = {}
    for switch, changed in flow.changes.items():
        for runs in changed.values():
            for run in runs:
                for v in (*run.inputs, *run.outputs):
                    by_value.setdefault(v, (set(), set()))[1].add(switch)
        for v in flow.differing[switch]:
            replaced = flow.graph.values[v].replaces
            for each in (v,) if replaced is None else (v, replaced):
                for group in by_value.setdefault(each, (set(), set())):
                    group.add(switch)
    return by_value
