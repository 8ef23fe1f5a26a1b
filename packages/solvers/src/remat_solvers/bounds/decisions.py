"""Which decisions of a graph's switches are tried, and what bounds all of them.

All decisions if they are few; else those of whole families, and the relaxed graph. That graph takes the best
of each decision at once: of a loss in chunks the bytes, and of the whole loss the time. So parts of the
decisions are bounded one by one: with a switch on, and with it off, then with another, the part with the
lowest bound first (branch and bound; A. H. Land and A. G. Doig, 1960).
"""

import heapq
from functools import partial
from itertools import chain, combinations, count
from math import isfinite

from remat_graph import Graph, decide, relaxed, specialize
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.specialize import family_of
from remat_solvers.bounds.graph_bound import GraphBound
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import in_parallel

MOST_COMBINED = 3  # switches of which all combinations are tried
BOUND_SHARE = 0.1  # of the remaining time, for one bound
MOST_PARTS, USUAL_OPS = 32, 600  # parts of the decisions that are bounded; fewer on larger graphs
NEAR = 0.005  # a ratio of base time: within it of the bound, a plan needs no better bound
FEW_PARTS, GAINED = 4, 0.05  # the search ends where a few more have not closed this share of the gap


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
    return GraphBound(graph, budget_nbytes).cut_s(deadline.share(BOUND_SHARE))


def decided_bound_s(
    graph: Graph,
    budget_nbytes: int,
    deadline: Deadline,
    *,
    relaxed_s: float,
    enough_s: float = float("inf"),
) -> float:
    """A lower bound on the compute seconds of a graph with switches under any decision of them.

    Args:
        graph: the training step.
        budget_nbytes: bound on the peak.
        deadline: ends the search with what is proven so far.
        relaxed_s: `time_bound_s` of the relaxed graph.
        enough_s: a bound that is as good as any higher one, such as the time of a known schedule.

    Returns:
        Seconds; infinite if nothing fits.
    """
    found, number = conflicts(graph), count()
    switches = sorted(graph.switches, key=_added_s(graph).__getitem__, reverse=True)

    def bound_s(decision: _Decision, within: Deadline) -> float:
        return time_bound_s(relaxed(decide(graph, *decision)), budget_nbytes, within)

    parts: list[_Part] = [(relaxed_s, next(number), frozenset(), frozenset())]
    most, done = MOST_PARTS * USUAL_OPS // max(USUAL_OPS, len(graph.ops)), 0
    least_s, before_s = GAINED * (enough_s - relaxed_s), relaxed_s
    while done < most and parts[0][0] < enough_s and not deadline.reached():
        known_s, _, on, off = parts[0]
        switch = next((each for each in switches if each not in on | off), None)
        if switch is None:
            break
        halves = ((on | {switch}, off | found[switch]), (on, off | {switch}))
        heapq.heappop(parts)
        for half, half_s in zip(
            halves, in_parallel([partial(bound_s, half) for half in halves], deadline), strict=True
        ):
            heapq.heappush(parts, (max(known_s, half_s), next(number), *half))
        done += len(halves)
        if done % FEW_PARTS == 0:
            if isfinite(enough_s) and parts[0][0] < before_s + least_s:
                break
            before_s = parts[0][0]
    return parts[0][0]


_Decision = tuple[frozenset[str], frozenset[str]]
"""The switches that are on, and those that are off."""

_Part = tuple[float, int, frozenset[str], frozenset[str]]
"""Its bound, a number that breaks ties, and the decision."""


def _added_s(graph: Graph) -> dict[str, float]:
    """Per switch the seconds that it adds when it is on."""
    added_s = dict.fromkeys(graph.switches, 0.0)
    for op in graph.ops:
        for other in op.alternatives:
            added_s[other.switch] += op.implementations[other.first].time_s - op.first.time_s
    return added_s
