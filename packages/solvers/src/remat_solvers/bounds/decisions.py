"""Which decisions of a graph's switches are tried, and what bounds all of them.

All decisions if they are few; else those of whole families, and the relaxed graph. That graph takes the best
of each decision at once: of a loss in chunks the bytes, and of the whole loss the time. So parts of the
decisions are bounded one by one: with a switch on, and with it off, then with another, the part with the
lowest bound first (branch and bound; A. H. Land and A. G. Doig, 1960). Two switches are tried, the one that
adds the most seconds and the one whose ops are nearest to where memory binds, of the masks of a model's
dropouts for example; taken is that which raises the lower of its two bounds more (strong branching;
D. Applegate et al., 1995). Rounds of the coarse program then raise the bounds of the lowest parts.
"""

import heapq
from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain, combinations, count
from math import isfinite

import attrs

from remat_graph import Graph, decide, relaxed, specialize
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.specialize import family_of
from remat_solvers.bounds.budget_bound import Floor, budget_floor
from remat_solvers.bounds.graph_bound import GraphBound
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import batches, in_parallel

MOST_COMBINED = 3  # switches of which all combinations are tried
BOUND_SHARE = 0.1  # of the remaining time, for one bound
MOST_PARTS, USUAL_OPS = 32, 600  # parts of the decisions that are bounded; fewer on larger graphs
NEAR = 0.005  # a ratio of base time: within it of the bound, a plan needs no better bound
GAINED = 0.05  # a part is divided if the lower bound of its halves closes this share of the gap
ROUNDING = 1e-5  # within this ratio of a plan its bound is that plan, but for rounding
HIGHER = 1 / 6  # weight of the higher bound of two halves (T. Achterberg, 2007)
REFINED = 4  # parts of which the coarse program is solved


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


def lowest_floor(graph: Graph) -> tuple[Floor, Graph]:
    """The floor under any decision of the switches, and the graph without switches to which it belongs."""
    floors = [(budget_floor(each), each) for each in bounding_graphs(graph)]
    return min(floors, key=lambda pair: pair[0].nbytes)


def time_bound_s(graph: Graph, budget_nbytes: int, deadline: Deadline) -> float:
    """A lower bound on the compute seconds of a graph without switches; infinite if nothing fits."""
    return GraphBound(graph, budget_nbytes).cut_s(deadline.share(BOUND_SHARE))


def decided_bound_s(
    graph: Graph, budget_nbytes: int, deadline: Deadline, *, enough_s: float = float("inf")
) -> float:
    """A lower bound on the compute seconds of a graph with switches under any decision of them.

    Args:
        graph: the training step.
        budget_nbytes: bound on the peak.
        deadline: ends the search with what is proven so far.
        enough_s: a bound that is as good as any higher one, such as the time of a known schedule.

    Returns:
        Seconds; infinite if nothing fits.
    """
    bound = DecidedBound(graph, budget_nbytes, deadline)
    bound.branch(enough_s, deadline)
    return bound.lower_s


@attrs.frozen(kw_only=True, eq=False)
class _Part:
    """The decisions with some switches on and others off."""

    bound: GraphBound
    lower_s: float  # no schedule under these decisions is faster
    on: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    refined: bool = False  # whether rounds of the coarse program have raised it
    whole: bool = False  # whether dividing it gained too little


class DecidedBound:
    """Bounds on the compute seconds of parts of a graph's decisions, which together are all of them.

    Args:
        graph: the training step.
        budget_nbytes: bound on the peak.
        deadline: of the first bound, that of all decisions together.

    Attributes:
        floor_nbytes: no schedule has a smaller peak.
    """

    def __init__(self, graph: Graph, budget_nbytes: int, deadline: Deadline) -> None:
        self.graph, self.budget_nbytes = graph, budget_nbytes
        self._number = count()
        self._bounded = 0  # parts, those of halves that were not taken too
        self._parts: list[tuple[float, int, _Part]] = []  # a heap, the lowest bound on top
        self._conflicts = conflicts(graph)
        self._added_s = _added_s(graph)
        whole = self._part(frozenset(), frozenset(), deadline)
        self.floor_nbytes = whole.bound.floor_nbytes
        self._push(whole)

    @property
    def lower_s(self) -> float:
        """No schedule within the budget is faster; infinite if nothing fits."""
        return self._parts[0][0]

    def _push(self, part: _Part) -> None:
        heapq.heappush(self._parts, (part.lower_s, next(self._number), part))

    def _replace_lowest(self, parts: Collection[_Part]) -> None:
        heapq.heappop(self._parts)
        for part in parts:
            self._push(part)

    def _part(self, on: frozenset[str], off: frozenset[str], deadline: Deadline) -> _Part:
        graph = relaxed(decide(self.graph, on, off) if on or off else self.graph)
        bound = GraphBound(graph, self.budget_nbytes)
        return _Part(bound=bound, lower_s=bound.cut_s(deadline.share(BOUND_SHARE)), on=on, off=off)

    def _halves(
        self, part: _Part, switches: list[str], enough_s: float, deadline: Deadline
    ) -> tuple[_Part, _Part]:
        """A part with one of the switches on, and one with it off: that whose halves are raised most."""
        on, off = part.on, part.off
        decided = [
            each
            for switch in switches
            for each in ((on | {switch}, off | self._conflicts[switch]), (on, off | {switch}))
        ]
        found: list[_Part] = []
        for pair in batches(decided):
            found += in_parallel([partial(self._part, *each) for each in pair], deadline)
        self._bounded += len(found)
        raised = [attrs.evolve(each, lower_s=max(part.lower_s, each.lower_s)) for each in found]
        pairs = zip(raised[::2], raised[1::2], strict=True)

        def score(pair: tuple[_Part, _Part]) -> float:
            least_s, most_s = sorted(min(each.lower_s, enough_s) for each in pair)
            return (1 - HIGHER) * least_s + HIGHER * most_s

        return max(pairs, key=score)

    def _switches(self, part: _Part) -> list[str]:
        """Of those that are open in a part the one nearest to where memory binds, and the costliest."""
        place = next((i for i, op in enumerate(self.graph.ops) if op.name == part.bound.binding), 0)
        distance: dict[str, int] = {}
        for i, op in enumerate(self.graph.ops):
            for other in op.alternatives:
                distance[other.switch] = min(abs(i - place), distance.get(other.switch, len(self.graph.ops)))
        open_ = [switch for switch in self.graph.switches if switch not in part.on | part.off]
        nearest = sorted(open_, key=distance.__getitem__)[:1]
        costliest = sorted(open_, key=self._added_s.__getitem__, reverse=True)[:1]
        return list(dict.fromkeys(nearest + costliest))

    def branch(self, enough_s: float, deadline: Deadline) -> None:
        """Divide the part with the lowest bound while that gains, until it is at least `enough_s`."""
        most = self._bounded + MOST_PARTS * USUAL_OPS // max(USUAL_OPS, len(self.graph.ops))
        least_s = GAINED * (enough_s - self.lower_s) if isfinite(enough_s) else 0.0
        while self._bounded < most and self.lower_s < enough_s and not deadline.reached():
            halves = self._divided(self._parts[0][2], least_s, enough_s, deadline)
            if not halves:
                break
            self._replace_lowest(halves)

    def refine(self, known_s: float, deadline: Deadline) -> None:
        """Raise the bounds of the lowest parts by rounds of the coarse program.

        Args:
            known_s: time of a known schedule; no higher bound is needed.
            deadline: limit by the clock.
        """
        for _ in range(REFINED):
            part = self._parts[0][2]
            if part.refined or part.lower_s >= known_s or deadline.reached():
                return
            lower_s = max(part.lower_s, part.bound.rounds_s(known_s, deadline))
            self._replace_lowest((attrs.evolve(part, lower_s=lower_s, refined=True),))

    def prove(self, known_s: float, deadline: Deadline) -> None:
        """Raise the lowest bound until it is `known_s`, nothing raises it, or the deadline has passed.

        The lowest part is divided once where that gains; else it gets rounds of the coarse program, of any
        size, and is divided when they end.

        Args:
            known_s: time of a known schedule; no higher bound is needed.
            deadline: limit by the clock; reports each higher bound.
        """
        # A strict proof ends below the program's optimum by the rounding error that it allows for.
        enough_s = (1 - ROUNDING) * known_s
        while self.lower_s < enough_s and not deadline.reached():
            before_s, part = self.lower_s, self._parts[0][2]
            parts = self._raised(part, known_s, enough_s, deadline)
            if not parts:
                return
            self._replace_lowest(parts)
            if self.lower_s > before_s:
                deadline.report("proof", known_s, self.lower_s)

    def _raised(self, part: _Part, known_s: float, enough_s: float, deadline: Deadline) -> Collection[_Part]:
        """What takes the place of a part; nothing if nothing raises its bound."""
        if not part.whole:
            gap_s = known_s - part.lower_s
            least_s = GAINED * gap_s if isfinite(gap_s) else 0.0
            halves = self._divided(part, least_s, enough_s, deadline)
            return halves or (attrs.evolve(part, whole=True),)
        raised_s = part.bound.round_s(known_s, deadline)
        if raised_s is None:
            return self._divided(part, -1.0, enough_s, deadline)
        return (attrs.evolve(part, lower_s=max(part.lower_s, raised_s)),)

    def _divided(self, part: _Part, least_s: float, enough_s: float, deadline: Deadline) -> Collection[_Part]:
        """The halves of a part if they raise its bound by more than `least_s`, or one is `enough_s`."""
        switches = self._switches(part)
        if not switches:
            return ()
        halves = self._halves(part, switches, enough_s, deadline)
        gains = _lower_s(halves) > part.lower_s + least_s
        return halves if gains or any(half.lower_s >= enough_s for half in halves) else ()


def _lower_s(parts: Iterable[_Part]) -> float:
    return min(part.lower_s for part in parts)


def _added_s(graph: Graph) -> dict[str, float]:
    """Per switch the seconds that it adds when it is on."""
    added_s = dict.fromkeys(graph.switches, 0.0)
    for op in graph.ops:
        for other in op.alternatives:
            added_s[other.switch] += op.implementations[other.first].time_s - op.first.time_s
    return added_s
