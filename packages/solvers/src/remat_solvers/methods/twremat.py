"""`twremat`: divide and conquer on a tree decomposition.

Kumar, Purohit, Svitkina, Vee, Wang 2019, "Efficient rematerialization for deep networks". A few ops (a
separator) split a graph into parts of at most half its size. The method computes the separator's ops one
after the other, each with the inputs that it needs from the parts, computed recursively and freed again; then
it computes recursively what is wanted of each part, with the separator's values live. A graph of treewidth k
and n ops is computed with O(k log n) live values and n^O(log k) runs at worst.

Separators are the bags of a tree decomposition, made by eliminating an op of least degree at a time, that
split a part most evenly. Parts of at most `leaf` ops are computed directly: a small leaf needs the least
memory and the most runs. The best leaf size for a budget is not known in advance, so several are tried, from
large to small, and the fastest plan that fits is taken.

The forward first runs once in trace order, since the tangents come live only after it.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import attrs
import numpy as np

from remat_graph import Graph
from remat_graph.partition import repeatable
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.linear_order import without_useless
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge

TRIED = 16  # bags evaluated for one separator
LONGEST = 40  # mean runs per op, beyond which a plan is given up


@attrs.frozen(kw_only=True)
class TwRemat(Rematerializer):
    """The tree-decomposition method.

    Attributes:
        leaves: sizes of the parts that are computed directly, tried one after the other; None for the number
            of ops, halved down to 4.
    """

    name: ClassVar[str] = "twremat"
    leaves: tuple[int, ...] | None = None

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, arrays = problem.graph, flatten(problem.graph)
        parts = TreeDecomposition(graph)
        count = len(graph.ops)
        leaves = self.leaves or [count >> i for i in range(1, count.bit_length()) if count >> i >= 4]
        best, best_s, leaf_of_best = None, float("inf"), 0
        for leaf in leaves:
            if deadline.reached():
                break
            order = parts.order(leaf, deadline)
            if order is None:
                break  # smaller leaves need even more runs, or time is up
            cleaned = np.array(without_useless(graph, order), np.int64)
            result = evaluate(arrays, cleaned)
            fits = result.valid and result.peak_nbytes <= problem.budget_nbytes
            if fits and result.time_s < best_s:
                best, best_s, leaf_of_best = cleaned, result.time_s, leaf
        return judge(problem, best, stats={"width": parts.width, "leaf": leaf_of_best})


class TreeDecomposition:
    """A graph's ops with a tree decomposition."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph.ops)
        producer = graph.producer
        self.before: list[set[int]] = []
        for i, op in enumerate(graph.ops):
            made_by = {producer[v] for way in op.implementations for v in way.inputs}
            self.before.append({p for p in made_by if p is not None and p != i})
        self.neighbors: list[set[int]] = [set(found) for found in self.before]
        for i, adjacent in enumerate(self.before):
            for p in adjacent:
                self.neighbors[p].add(i)
        self.repeatable_ops = set(repeatable(graph, range(count)))
        self.ran: set[int] = set()
        self.bags = decompose(self.neighbors)
        self.width = max((len(bag) for bag in self.bags), default=1) - 1
        self.bags_of: list[list[int]] = [[] for _ in range(count)]
        for b, bag in enumerate(self.bags):
            for member in bag:
                self.bags_of[member].append(b)

    def order(self, leaf: int, deadline: Deadline) -> list[int] | None:
        """All ops, repeats included; None if the order gets too long or the deadline is reached."""
        ops = self.graph.ops
        forward = [i for i, op in enumerate(ops) if not op.backward]
        order = list(forward)
        self.ran = set(forward)
        pinned = [
            i
            for i, op in enumerate(ops)
            if op.backward and any(self.graph.values[v].pinned for v in op.first.outputs)
        ]
        wanted = set(pinned) or {i for i, op in enumerate(ops) if op.backward}
        most = LONGEST * len(ops)
        # Ops that may run only once have run: their values are live throughout.
        fixed = {i for i in forward if i not in self.repeatable_ops}
        if not self.emit(set(range(len(ops))) - fixed, wanted - fixed, leaf, order, most, deadline):
            return None
        seen = set(order)
        late = [i for i in range(len(ops)) if i not in seen]
        return self.with_late(order, late)

    def with_late(self, order: list[int], late: Sequence[int]) -> list[int]:
        """The order with the remaining ops at its end, after recomputation of their inputs."""
        for op in late:
            needed = self.ancestors(op, set(range(len(self.before))))
            order += [*self.runs(sorted(needed)), *self.runs([op])]
        return order

    def ancestors(self, op: int, inside: set[int]) -> set[int]:
        """All direct and indirect inputs of an op within a part."""
        found: set[int] = set()
        waiting = [p for p in self.before[op] if p in inside]
        while waiting:
            x = waiting.pop()
            if x not in found:
                found.add(x)
                waiting += [p for p in self.before[x] if p in inside]
        return found

    def emit(
        self, part: set[int], wanted: set[int], leaf: int, order: list[int], most: int, deadline: Deadline
    ) -> bool:
        """Append runs that compute the wanted ops' values; whether length and time allowed it."""
        needed = set(wanted)
        for op in wanted:
            needed |= self.ancestors(op, part)
        if not needed:
            return True
        if len(order) + len(needed) > most or deadline.reached():
            return False
        if len(needed) <= leaf:
            order += self.runs(sorted(needed))
            return True
        separator = self.separator(needed)
        pieces = self.components(needed - separator)
        piece_of = {op: piece for piece in pieces for op in piece}
        for x in sorted(separator):
            asked: dict[frozenset[int], set[int]] = {}
            for p in self.before[x]:
                if p in piece_of:
                    asked.setdefault(piece_of[p], set()).add(p)
            for piece, inputs in sorted(asked.items(), key=lambda entry: min(entry[0])):
                if not self.emit(set(piece), inputs, leaf, order, most, deadline):
                    return False
            order += self.runs([x])
        for piece in sorted(pieces, key=min):
            if not self.emit(set(piece), wanted & piece, leaf, order, most, deadline):
                return False
        return True

    def runs(self, ops: Iterable[int]) -> list[int]:
        """The ops that may run now: repeatable ones, and those that have not run."""
        chosen = [op for op in ops if op in self.repeatable_ops or op not in self.ran]
        self.ran.update(chosen)
        return chosen

    def separator(self, part: set[int]) -> set[int]:
        """The bag whose removal leaves the smallest largest piece."""
        touching = sorted({b for op in part for b in self.bags_of[op]})
        step = max(1, len(touching) // TRIED)
        bags = [set(self.bags[b] & part) for b in touching[::step]]
        return min(bags, key=lambda bag: (self.largest(part - bag), len(bag)) if bag else (len(part), 0))

    def largest(self, ops: set[int]) -> int:
        """Size of the largest connected piece."""
        return max(map(len, self.components(ops)), default=0)

    def components(self, ops: set[int]) -> list[frozenset[int]]:
        """Connected pieces, regardless of the direction of dependencies."""
        left, found = set(ops), []
        while left:
            waiting = [left.pop()]
            piece = set(waiting)
            while waiting:
                adjacent = self.neighbors[waiting.pop()] & left
                left -= adjacent
                piece |= adjacent
                waiting += adjacent
            found.append(frozenset(piece))
        return found


def decompose(neighbors: Sequence[set[int]]) -> list[frozenset[int]]:
    """Bags of a tree decomposition: eliminate a node of least degree, connect its neighbours, repeat."""
    adjacent = [set(found) for found in neighbors]
    left = set(range(len(adjacent)))
    buckets: list[set[int]] = [set() for _ in range(len(adjacent) + 1)]
    for x in left:
        buckets[len(adjacent[x])].add(x)
    bags = []
    degree = 0
    while left:
        while not buckets[degree]:
            degree += 1
        x = min(buckets[degree])
        bag = frozenset(adjacent[x] | {x})
        bags.append(bag)
        buckets[degree].discard(x)
        left.discard(x)
        for y in adjacent[x]:
            buckets[len(adjacent[y])].discard(y)
            adjacent[y] |= adjacent[x]
            adjacent[y] -= {x, y}
            buckets[len(adjacent[y])].add(y)
        degree = max(0, min((len(adjacent[y]) for y in adjacent[x]), default=degree) - 1)
    return bags
