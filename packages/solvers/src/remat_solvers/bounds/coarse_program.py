"""The integer program of the coarse bound; `coarse_time_bound` explains its variables and rows."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from remat_graph import Graph
from remat_solvers.bounds.budget_bound import certainly_live, unavoidable
from remat_solvers.bounds.highs import MixedIntegerProgram
from remat_solvers.bounds.reachability import Reachability, overwriters
from remat_solvers.evaluation.arrays import Floats

ALWAYS = -1  # in place of a variable that is certainly 1
Runs = dict[int, int]
"""Per op that may run in an interval the variable whether it does."""


class Moment(NamedTuple):
    """When an op first runs; or, `again`, its first repeat since the moment before.

    If there is no repeat before the next moment that is a first run, the moment is when the op of the one
    before has run.
    """

    op: int
    again: bool = False  # only if it first ran before the last moment that is a first run


class CoarseProgram:
    """The program for given moments, of which each first run is an ancestor of the next in `reach`.

    Costs are in units of `unit_s` seconds; a repeat costs at most `most_s` seconds.
    """

    def __init__(
        self,
        graph: Graph,
        reach: Reachability,
        budget_nbytes: int,
        moments: tuple[Moment, ...],
        unit_s: float,
        most_s: float,
    ) -> None:
        self.graph, self.reach, self.moments = graph, reach, moments
        self.unit_s, self.most_s = unit_s, most_s
        self.rows = MixedIntegerProgram()
        self.constant = 0.0
        self.earliest, self.latest = self._windows()
        self.runs = self._add_runs()
        self._add_boundary()
        self._add_states()
        self.kept = self._add_kept()
        for s, runs in enumerate(self.runs):
            self._add_reads(s, runs)
        for s in range(1, len(moments)):
            self._add_reads(s, self._add_rest(s))
        self._add_keeping()
        self._add_pinned()
        for s, moment in enumerate(moments, 1):
            self._add_memory(s, moment, budget_nbytes)

    def _windows(self) -> tuple[list[int], list[int]]:
        """Per op the first and the last interval of its first run."""
        ops, reach = self.graph.ops, self.reach
        earliest, latest = [0] * len(ops), [len(self.moments)] * len(ops)
        for s, (j, again) in reversed(list(enumerate(self.moments, 1))):
            if again:
                continue
            coming, before = reach.descendants[j] | 1 << j, reach.ancestors[j]
            for i, op in enumerate(ops):
                if coming >> i & 1 or (reach.after_boundary[i] and not ops[j].backward):
                    earliest[i] = max(earliest[i], s)
                if before >> i & 1 or (reach.after_boundary[j] and not op.backward):
                    latest[i] = s - 1
            latest[j] = s
        return earliest, latest

    def _add_runs(self) -> list[Runs]:
        """Per interval the ops that may run in it."""
        runs: list[Runs] = [{} for _ in range(len(self.moments) + 1)]
        for i, op in enumerate(self.graph.ops):
            again = None
            if op.rerun is not None:
                again = min(self.most_s, op.implementations[op.rerun].time_s) / self.unit_s
            early, late = self.earliest[i], self.latest[i]
            if early == late:
                runs[early][i] = ALWAYS
            else:
                for s in range(early, late + 1):
                    runs[s][i] = self.rows.variable(again or 0.0)
                self.constant -= again or 0.0
                most = np.inf if again is not None else 1.0
                self.rows.row([(runs[s][i], 1.0) for s in range(early, late + 1)], 1.0, most)
            if again is not None:
                for s in range(late + 1, len(self.moments) + 1):
                    if self.moments[s : s + 1] != (
                        Moment(i, again=True),
                    ):  # else the next one begins with it
                        runs[s][i] = self.rows.variable(again)
        return runs

    def _add_boundary(self) -> None:
        """An op after the boundary comes after the first run of every forward op."""
        ops, reach = self.graph.ops, self.reach
        forward = [i for i, op in enumerate(ops) if not op.backward]
        for s in range(len(self.moments)):
            late = [i for i in forward if self.latest[i] > s]
            early = [i for i in self.runs[s] if reach.after_boundary[i]]
            if late and early:
                passed = self.rows.variable(0.0)  # by the end of interval s
                for i in early:
                    self._requires(self.runs[s][i], [(passed, -1.0)])
                for i in late:
                    self._requires(passed, self._ran(i, s))

    def _add_states(self) -> None:
        """A state of a buffer or a generator is read after it was written, and before it is overwritten."""
        graph = self.graph
        after = {(i, w) for w, op in enumerate(graph.ops) for i in self._readers(op.first.outputs)}
        after |= {(w, i) for v, w in overwriters(graph).items() for i in self._readers([v])}
        for then, first in sorted(after):
            if then != first:
                for s in range(self.earliest[then], min(self.latest[then] + 1, self.latest[first])):
                    self._requires(self.runs[s][then], self._ran(first, s))

    def _readers(self, values: Iterable[int]) -> list[int]:
        """The ops whose first runs read one of the values that are free."""
        free = {v for v in values if self.reach.free[v]}
        if not free:
            return []
        return [i for i, op in enumerate(self.graph.ops) if not free.isdisjoint(op.first.inputs)]

    def _ran(self, i: int, s: int) -> list[tuple[int, float]]:
        """The runs of op i until the end of interval s, before the last that its first run may be in."""
        return [(self.runs[t][i], -1.0) for t in range(self.earliest[i], s + 1)]

    def _add_rest(self, begin: int) -> Runs:
        """The ops that may run in any of the intervals from `begin` on, as if these were one.

        The rows for whole intervals do not change the least cost, but its bound in fractions, which else
        falls with each moment: half a run in each of two intervals needs half the inputs, computed once.
        """
        rest: Runs = {}
        for i in range(len(self.graph.ops)):
            each = [runs[i] for runs in self.runs[begin:] if i in runs]
            if self.earliest[i] >= begin:
                rest[i] = ALWAYS
            elif len(each) == 1:
                rest[i] = each[0]
            elif each:
                rest[i] = self.rows.variable(0.0)
                self.rows.row([(rest[i], -1.0), *((run, 1.0) for run in each)], 0.0, np.inf)
                for run in each:
                    self.rows.row([(rest[i], 1.0), (run, -1.0)], 0.0, np.inf)
        return rest

    def _add_kept(self) -> dict[tuple[int, int], int]:
        kept: dict[tuple[int, int], int] = {}
        graph, reach = self.graph, self.reach
        certain = certainly_live(graph, reach)
        for s, (j, again) in enumerate(self.moments, 1):
            there: set[int] = set()
            if not again:
                there = unavoidable(certain, j) | {v for v in graph.ops[j].first.inputs if not reach.free[v]}
            for v, maker in enumerate(graph.producer):
                if reach.free[v] or (maker is None and v not in reach.tangent_set):
                    continue
                if v in there:
                    kept[s, v] = ALWAYS
                elif maker is None or self.earliest[maker] < s:
                    kept[s, v] = self.rows.variable(0.0)
        return kept

    def _add_reads(self, begin: int, runs: Runs) -> None:
        """One of `runs` reads what is live when interval `begin` begins or computed since by another one."""
        for i, run in runs.items():
            op = self.graph.ops[i]
            inputs = set(op.first.inputs)
            if op.rerun is not None and self.earliest[i] < begin:
                again = set(op.implementations[op.rerun].inputs)
                inputs = again if self.latest[i] < begin else inputs & again
            for v in sorted(inputs):
                if not self.reach.free[v]:
                    self._implies(run, begin, v, runs)

    def _add_keeping(self) -> None:
        """A value that is live at a moment was live at the one before or was computed since."""
        for (s, v), kept in self.kept.items():
            if self.graph.producer[v] is not None or s > 1:
                self._implies(kept, s - 1, v, self.runs[s - 1])

    def _add_pinned(self) -> None:
        """A pinned value is live from its first computation on."""
        for (s, v), kept in self.kept.items():
            maker = self.graph.producer[v]
            if kept == ALWAYS or maker is None or not self.graph.values[v].pinned:
                continue
            for before in (self.kept.get((s - 1, v)), self.runs[s - 1].get(maker)):
                if before == ALWAYS:
                    self.rows.row([(kept, 1.0)], 1.0, np.inf)
                elif before is not None:
                    self.rows.row([(kept, 1.0), (before, -1.0)], 0.0, np.inf)

    def _implies(self, cause: int, s: int, v: int, runs: Runs) -> None:
        """If `cause` holds, value v is live at the beginning of interval s or computed by one of `runs`."""
        maker = self.graph.producer[v]
        if maker is None and not any(
            self.reach.after_boundary[j] for j, again in self.moments[:s] if not again
        ):
            return  # the tangents may come after the moment that begins the interval
        sources = [self.kept.get((s, v))]
        if maker is not None:
            sources.append(runs.get(maker))
        if ALWAYS in sources:
            return
        self._requires(cause, [(source, -1.0) for source in sources if source is not None])

    def _requires(self, cause: int, less: list[tuple[int, float]]) -> None:
        """If `cause` holds, one of the variables in `less` does, each of which has the coefficient -1."""
        if cause == ALWAYS:
            self.rows.row(less, -np.inf, -1.0)
        else:
            self.rows.row([(cause, 1.0), *less], -np.inf, 0.0)

    def _add_memory(self, s: int, moment: Moment, budget_nbytes: int) -> None:
        graph, reach = self.graph, self.reach
        op = graph.ops[moment.op]
        run = op.implementations[op.rerun] if moment.again and op.rerun is not None else op.first
        reusable = {output for output, _ in run.reuses}
        own = run.workspace_nbytes
        own += sum(graph.allocated_nbytes(v) for v in run.outputs if not reach.free[v] and v not in reusable)
        fixed, terms = reach.base_nbytes, []
        if moment.again:
            repeat = self.runs[s][moment.op]
            terms.append((repeat, own / budget_nbytes))
            for v in run.inputs:
                if not reach.free[v]:
                    self._implies(repeat, s, v, {})
        else:
            fixed += own
        for (other, v), kept in self.kept.items():
            nbytes = graph.allocated_nbytes(v)
            if other != s or not nbytes:
                continue
            if kept == ALWAYS:
                fixed += nbytes
            else:
                terms.append((kept, nbytes / budget_nbytes))
        self.rows.row(terms, -np.inf, (budget_nbytes - fixed) / budget_nbytes)

    def sequence(self, found: Floats, *, late: bool) -> list[list[int]]:
        """The ops of a solution by interval: first runs in trace order, repeats when they are needed.

        Values kept at a moment are computed before it; if `late`, only when they are read.
        """
        graph, reach = self.graph, self.reach

        def holds(variable: int) -> bool:
            return variable == ALWAYS or bool(found[variable] > 0.5)

        runs = [[i for i, variable in each.items() if holds(variable)] for each in self.runs]
        kept: list[set[int]] = [set() for _ in range(len(self.moments) + 2)]
        for (s, v), variable in self.kept.items():
            if holds(variable):
                kept[s].add(v)
        intervals: list[list[int]] = []
        ran: set[int] = set()
        there: set[int] = set()
        for s in range(len(self.moments) + 1):
            order: list[int] = []
            live, done = kept[s] & there if late else set(kept[s]), set[int]()
            if late:  # what cannot be recomputed stays, since it may be read later than in the program
                live |= there - reach.recomputable

            def demand(
                wanted: int, live: set[int] = live, done: set[int] = done, order: list[int] = order
            ) -> None:
                """Run an op after the makers of what it reads, unless that happened in this interval."""
                waiting = [(wanted, False)]
                while waiting:
                    i, ready = waiting.pop()
                    if i in done:
                        continue
                    op = graph.ops[i]
                    first = i not in ran
                    if ready:
                        done.add(i)
                        ran.add(i)
                        order.append(i)
                        live.update(op.first.outputs)
                        continue
                    waiting.append((i, True))
                    way = op.first if first or op.rerun is None else op.implementations[op.rerun]
                    for v in sorted(way.inputs, reverse=True):
                        maker = graph.producer[v]
                        if maker is not None and maker not in done and v not in live and not reach.free[v]:
                            waiting.append((maker, False))

            begin = self.moments[s - 1].op if s else None  # comes first: memory is bounded when it runs
            wanted = (i for i in runs[s] if i == begin or i not in ran)
            for i in sorted(wanted, key=lambda i: (i != begin, i)):
                demand(i)
            there = live | self.reach.tangent_set
            for v in sorted(kept[s + 1] - live if not late else ()):
                maker = graph.producer[v]
                if maker is not None:
                    demand(maker)
            intervals.append(order)
        return intervals
