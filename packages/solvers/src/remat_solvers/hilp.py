"""`hilp`: integer programs over a hierarchy.

The H-ILP of HiRemate: the step is cut into segments where little crosses; each distinct segment gets a menu
of ways to treat it, from the integer program of `checkmate` at several budgets (a segment that is still too
large is cut again and treated the same way); on top stands one more integer program, in the stage form,
whose ops are whole segments: running one forward without keeping, running one forward and keeping what an
option keeps, and running its backward by that option. So the choice of options and the choice of what runs
again are made together, and the graph need not be a chain.
"""

from collections.abc import Sequence
from typing import ClassVar

import attrs

from remat_graph import Graph
from remat_solvers.blocks import menus
from remat_solvers.chain_dp import Chain, Option
from remat_solvers.checkmate import Checkmate
from remat_solvers.evaluate import evaluate, flatten
from remat_solvers.interval_dp import narrow_places
from remat_solvers.linear import cut, repeatable, without_useless
from remat_solvers.noremat import Rematerializer
from remat_solvers.programs import minimize
from remat_solvers.protocol import Deadline, Problem, Solution, judge, positive_or_none
from remat_solvers.stages import TimeIsUp, Work, stage_program


@attrs.frozen(kw_only=True)
class Hilp(Rematerializer):
    """An integer program over segments, and one for each option of a segment.

    Attributes:
        segments: most segments of one level.
        leaf: a graph of at most so many ops is solved as it is.
        levels: budgets at which each distinct segment is solved.
        options: most options of a segment that the program on top sees.
        leaf_seconds: limit by the clock for one leaf at one budget; None for none.
        top_seconds: limit by the clock for one program on top; None for none.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "hilp"
    segments: int = attrs.field(default=8, validator=attrs.validators.ge(2))
    leaf: int = attrs.field(default=100, validator=attrs.validators.ge(2))
    levels: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    options: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    leaf_seconds: float | None = attrs.field(default=5.0, validator=positive_or_none)
    top_seconds: float | None = attrs.field(default=30.0, validator=positive_or_none)
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph = problem.graph
        pieces = cut(graph, narrow_places(graph, self.segments))
        if len(graph.ops) <= self.leaf or len(pieces) == 1:
            limits = (self.leaf_seconds, self.top_seconds)  # a graph that is a leaf itself may take longer
            seconds = None if None in limits else max(limit for limit in limits if limit is not None)
            return Checkmate(backend=self.backend).solve(problem, deadline.within(seconds))
        found = menus(graph, pieces, self.below().solve, self.levels, None, deadline)
        chosen = [_spread(options, self.options) for options in found]
        top = _Top(graph, Chain(graph, pieces), chosen)
        order, proven = top.solve(problem.budget_nbytes, self.backend, deadline.within(self.top_seconds))
        stats: dict[str, int | float | str | bool] = {
            "segments": len(pieces),
            "options": sum(map(len, chosen)),
            "proven": proven,
            "deadline": deadline.hit,
        }
        return judge(problem, order, stats=stats)

    def below(self) -> "Hilp":
        """The same for a segment, whose own program on top may take its share of the time."""
        share = None if self.top_seconds is None else self.top_seconds / (self.segments * self.levels)
        return attrs.evolve(self, top_seconds=share)


def _spread(options: Sequence[Option], most: int) -> list[Option]:
    """Keep-all, and of the others those that spread best over the seconds they cost."""
    first, rest = options[0], sorted(options[1:], key=lambda option: option.extra_s)
    if len(rest) >= most:
        rest = [rest[round(i * (len(rest) - 1) / max(1, most - 2))] for i in range(most - 1)]
    return [first, *dict.fromkeys(rest)]


class _Top:
    """The program over whole segments."""

    def __init__(self, graph: Graph, chain: Chain, options: Sequence[Sequence[Option]]) -> None:
        self.graph, self.chain, self.options = graph, chain, options
        self.pieces = chain.pieces
        self.sizes = dict(enumerate(chain.size))
        self.meaning: list[tuple[str, int, int]] = []  # per op: ("forward" or "backward", segment, option)
        self.reads: list[tuple[int, ...]] = []
        self.makes: list[tuple[int, ...]] = []
        self.time_s: list[float] = []
        self.first_s: list[float] = []
        self.scratch: list[int] = []
        self.groups: list[tuple[int, ...]] = []
        self.lump: dict[tuple[int, int], int] = {}

    def work(self) -> Work:
        """The coarse step."""
        count = len(self.pieces)
        for s in range(count):
            self.groups.append(self.forward(s))
        for s in range(count - 1, -1, -1):
            self.groups.append(self.backward(s))
        known = {v for values in (*self.reads, *self.makes) for v in values}
        made = {v for values in self.makes for v in values}
        forward = {op for group in self.groups[:count] for op in group}
        return Work(
            groups=tuple(self.groups),
            reads=tuple(self.reads),
            makes=tuple(self.makes),
            time_s=tuple(self.time_s),
            first_s=tuple(self.first_s),
            scratch=tuple(self.scratch),
            repeats=frozenset(forward),
            size={v: self.sizes[v] for v in sorted(known)},
            pinned=frozenset(v for v in made if v < len(self.graph.values) and self.graph.values[v].pinned),
            arriving=frozenset(known - made),
            boundary=count,
        )

    def add(
        self,
        meaning: tuple[str, int, int],
        reads: frozenset[int],
        makes: frozenset[int],
        peak: int,
        seconds: tuple[float, float],
    ) -> int:
        self.meaning.append(meaning)
        self.reads.append(tuple(sorted(reads)))
        self.makes.append(tuple(sorted(makes)))
        self.scratch.append(max(0, peak))
        self.first_s.append(seconds[0])
        self.time_s.append(seconds[1])
        return len(self.meaning) - 1

    def total(self, values: frozenset[int]) -> int:
        return sum(self.sizes[v] for v in values)

    def forward(self, s: int) -> tuple[int, ...]:
        """Run a segment without keeping anything, or keeping what one option keeps."""
        graph, chain = self.graph, self.chain
        run = self.pieces.forward[s]
        inside = {v for op in run for v in graph.ops[op].first.outputs}
        reads = frozenset(v for op in run for v in graph.ops[op].first.inputs) & chain.crossing(s)
        pinned = frozenset(v for v in inside if graph.values[v].pinned)
        hands_on = (chain.crossing(s + 1) & inside) | pinned
        ops = []
        for o, option in [(-1, None), *enumerate(self.options[s])]:
            saved = frozenset[int]() if option is None else option.saved - hands_on
            if option is not None:
                self.lump[s, o] = len(self.sizes)
                self.sizes[len(self.sizes)] = self.total(saved)
            makes = hands_on | (frozenset() if option is None else {self.lump[s, o]})
            peak = chain.peak(run, frozenset(), hands_on | saved, chain.crossing(s)) - self.total(makes)
            again = chain.again_s[s]
            ops.append(self.add(("forward", s, o), reads, frozenset(makes), peak, (0.0, again)))
        return tuple(ops)

    def backward(self, s: int) -> tuple[int, ...]:
        """Run the backward of a segment by one of its options."""
        graph, chain = self.graph, self.chain
        ops = []
        for o, option in enumerate(self.options[s]):
            inputs = frozenset(v for op in option.backward for v in graph.ops[op].first.inputs)
            made = frozenset(v for op in option.backward for v in graph.ops[op].first.outputs)
            around = (chain.crossing(s) | chain.crossing(s + 1)) & inputs
            coming = chain.coming[s + 1] & inputs
            hands_on = (chain.coming[s] & made) | {v for v in made if graph.values[v].pinned}
            hands_on -= {v for op in self.pieces.forward[s] for v in graph.ops[op].first.outputs}
            start = option.saved | around | coming
            peak = chain.peak(option.backward, start, frozenset(hands_on), frozenset())
            peak -= self.total(start) + self.total(frozenset(hands_on))
            reads = frozenset({self.lump[s, o]} | around | coming)
            ops.append(self.add(("backward", s, o), reads, frozenset(hands_on), peak, (option.extra_s, 0.0)))
        return tuple(ops)

    def solve(self, budget_nbytes: int, backend: str, deadline: Deadline) -> tuple[list[int] | None, bool]:
        """The fastest order that the program finds and that fits, and whether it is proven."""
        work, arrays = self.work(), flatten(self.graph)
        try:
            program = stage_program(work, budget_nbytes, deadline)
        except TimeIsUp:
            return None, False
        found, _, proven = minimize(program, whole=True, solver=backend, deadline=deadline)
        if found is None:
            return None, proven
        order: list[int] = []
        seen: set[int] = set()
        for t, frontier in enumerate(work.groups):
            running = [op for group in work.groups[:t] for op in group] + list(frontier)
            for op in running:
                if work.groups[t] != (op,) and not (
                    (t, op) in program.runs and found[program.runs[t, op]] > 0.5
                ):
                    continue
                kind, s, o = self.meaning[op]
                if kind == "backward":
                    order += self.options[s][o].backward
                    continue
                run = self.pieces.forward[s]
                order += repeatable(self.graph, run) if s in seen else run
                seen.add(s)
        order = without_useless(self.graph, order)
        result = evaluate(arrays, order)
        return (order if result.valid and result.peak_nbytes <= budget_nbytes else None), proven
