"""The integer program of the coarse bound; `coarse_time_bound` explains its variables and rows."""

import numpy as np

from remat_graph import Graph
from remat_solvers.bounds.budget_bound import certainly_live, unavoidable
from remat_solvers.bounds.highs import MixedIntegerProgram
from remat_solvers.bounds.reachability import Reachability
from remat_solvers.evaluation.arrays import Floats

ALWAYS = -1  # in place of a variable that is certainly 1
Runs = dict[int, int]
"""Per op that may run in an interval the variable whether it does."""


class CoarseProgram:
    """The program for given moments, each an ancestor of the next in `reach`.

    Costs are in units of `unit_s` seconds; a repeat costs at most `most_s` seconds.
    """

    def __init__(
        self,
        graph: Graph,
        reach: Reachability,
        budget_nbytes: int,
        moments: tuple[int, ...],
        unit_s: float,
        most_s: float,
    ) -> None:
        self.graph, self.reach, self.moments = graph, reach, moments
        self.unit_s, self.most_s = unit_s, most_s
        self.rows = MixedIntegerProgram()
        self.constant = 0.0
        self.earliest, self.latest = self._windows()
        self.runs = self._add_runs()
        self.kept = self._add_kept()
        for s, runs in enumerate(self.runs):
            self._add_reads(s, runs)
        for s in range(1, len(moments)):
            self._add_reads(s, self._add_rest(s))
        self._add_keeping()
        self._add_pinned()
        for s, j in enumerate(moments, 1):
            self._add_memory(s, j, budget_nbytes)

    def _windows(self) -> tuple[list[int], list[int]]:
        """Per op the first and the last interval of its first run."""
        ops, reach = self.graph.ops, self.reach
        earliest, latest = [0] * len(ops), [len(self.moments)] * len(ops)
        for s, j in reversed(list(enumerate(self.moments, 1))):
            coming, before = reach.descendants[j] | 1 << j, reach.ancestors[j]
            for i, op in enumerate(ops):
                if coming >> i & 1 or (reach.after_boundary[i] and not ops[j].backward):
                    earliest[i] = max(earliest[i], s)
                if before >> i & 1 or (reach.after_boundary[j] and not op.backward):
                    latest[i] = s - 1
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
                    runs[s][i] = self.rows.variable(again)
        return runs

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
        for s, j in enumerate(self.moments, 1):
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
        if maker is None and (s == 0 or not self.reach.after_boundary[self.moments[s - 1]]):
            return  # the tangents may come after the moment that begins the interval
        sources = [self.kept.get((s, v))]
        if maker is not None:
            sources.append(runs.get(maker))
        if ALWAYS in sources:
            return
        terms = [(source, -1.0) for source in sources if source is not None]
        if cause == ALWAYS:
            self.rows.row(terms, -np.inf, -1.0)
        else:
            self.rows.row([(cause, 1.0), *terms], -np.inf, 0.0)

    def _add_memory(self, s: int, j: int, budget_nbytes: int) -> None:
        graph, reach = self.graph, self.reach
        run = graph.ops[j].first
        reusable = {output for output, _ in run.reuses}
        fixed = reach.base_nbytes + run.workspace_nbytes
        fixed += sum(
            graph.allocated_nbytes(v) for v in run.outputs if not reach.free[v] and v not in reusable
        )
        terms = []
        for (moment, v), kept in self.kept.items():
            nbytes = graph.allocated_nbytes(v)
            if moment != s or not nbytes:
                continue
            if kept == ALWAYS:
                fixed += nbytes
            else:
                terms.append((kept, nbytes / budget_nbytes))
        self.rows.row(terms, -np.inf, (budget_nbytes - fixed) / budget_nbytes)

    def order(self, found: Floats, *, late: bool) -> list[int]:
        """The sequence of a solution: first runs in trace order, repeats when they are needed.

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
        order: list[int] = []
        ran: set[int] = set()
        there: set[int] = set()
        for s in range(len(self.moments) + 1):
            live, done = kept[s] & there if late else set(kept[s]), set[int]()
            if late:  # what cannot be recomputed stays, since it may be read later than in the program
                live |= there - reach.recomputable

            def demand(wanted: int, live: set[int] = live, done: set[int] = done) -> None:
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

            begin = self.moments[s - 1] if s else None  # comes first: memory is bounded when it runs
            for i in sorted((i for i in runs[s] if i not in ran), key=lambda i: (i != begin, i)):
                demand(i)
            there = live | self.reach.tangent_set
            for v in sorted(kept[s + 1] - live if not late else ()):
                maker = graph.producer[v]
                if maker is not None:
                    demand(maker)
        return order
