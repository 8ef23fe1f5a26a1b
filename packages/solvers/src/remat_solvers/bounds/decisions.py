"""Which decisions of a graph's switches are tried, and which graphs without switches bound it.

All decisions if they are few; else those of whole families, and the relaxed graph.
"""

from itertools import chain, combinations

from remat_graph import Graph, noremat_peak_nbytes, relaxed, specialize
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.specialize import family_of
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.reachability import reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.protocol import Deadline

MOST_COMBINED = 3  # switches of which all combinations are tried
BOUND_SHARE = 0.1  # of the remaining time, for one bound


def combinations_of(graph: Graph) -> tuple[tuple[frozenset[str], ...], bool]:
    """The combinations of switches to try, and whether these are all; all off comes first."""
    switches, found = graph.switches, conflicts(graph)
    if len(switches) <= MOST_COMBINED:
        subsets = chain.from_iterable(combinations(switches, n) for n in range(len(switches) + 1))
        return tuple(frozenset(s) for s in subsets if compatible(found, s) == set(s)), True
    families = {name: [s for s in switches if family_of(s) == name] for name in map(family_of, switches)}
    tried = [(), switches, *families.values()]
    tried += [[s for s in switches if family_of(s) != name] for name in families]
    return tuple(dict.fromkeys(compatible(found, each) for each in tried)), False


def bounding_graphs(graph: Graph) -> tuple[Graph, ...]:
    """Graphs without switches of which at least one allows whatever a schedule of `graph` does."""
    tried, all_of_them = combinations_of(graph)
    return tuple(specialize(graph, on).graph for on in tried) if all_of_them else (relaxed(graph),)


def time_bound_s(graph: Graph, budget_nbytes: int, deadline: Deadline) -> float:
    """A lower bound on the compute seconds of a graph without switches; infinite if nothing fits."""
    reach = reachability(graph)
    if budget_nbytes < budget_floor(graph, reach).nbytes:
        return float("inf")
    if noremat_peak_nbytes(graph) <= budget_nbytes:
        return graph.time_s
    return graph.time_s + CutBound(graph, reach).extra_s(budget_nbytes, deadline.share(BOUND_SHARE))
