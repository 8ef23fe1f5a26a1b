"""`hilp`: integer programs over a hierarchy.

The H-ILP of HiRemate: the step is grouped from bottom to top (`remat_graph.partition.grouped`). Each distinct
group gets a table of options, from the integer program of `checkmate` at several budgets for the peak and for
what is kept; a group that is still too large is grouped again and treated the same way. At the top is one
more integer program, in the stage form, whose ops are whole groups: running a group forward without keeping
anything, running it forward and keeping what an option keeps, and running its backward by that option. So the
program chooses options and recomputation together, and the graph need not be a chain.

The top program knows only the peak memory of a group and cannot rerun a part of it. So if it finds nothing it
is retried with a larger budget, and its result is repaired, see `repair`.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs
import numpy as np

from remat_graph.partition import Partition, grouped
from remat_solvers.chain.block_options import GAP, OptionTable
from remat_solvers.chain.table import ConservativeChain, GroupRun, Option, order_of_runs
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate, flatten
from remat_solvers.local_search.repair import repair_orders
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.methods.hierarchy import Hierarchical
from remat_solvers.mip.cvxpy_backend import minimize_with_cvxpy
from remat_solvers.mip.stage_program import DeadlineReached, StagedStep, stage_program
from remat_solvers.protocol import Deadline, Problem, Solution, part_count, time_limit

TOP_BUDGETS = 5  # budgets of the top program, from the real one to the unplanned peak


@attrs.frozen(kw_only=True)
class Hilp(Hierarchical):
    """An integer program over groups, and one for each option of a group.

    Attributes:
        segments: most groups of one level.
        leaf: a graph with at most this many ops is solved directly.
        levels: budgets for what each distinct group keeps.
        options: most options of a group in the top program.
        leaf_seconds: limit by the clock for one leaf at one budget; None for none.
        top_seconds: limit by the clock for one top program; None for none.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "hilp"
    segments: int = part_count(8, 2)
    leaf: int = attrs.field(default=40, validator=attrs.validators.ge(2))
    levels: int = part_count(4)
    options: int = part_count(4)
    leaf_seconds: float | None = time_limit(1.0)
    top_seconds: float | None = time_limit(30.0)
    backend: str = "HIGHS"

    def solve_small(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve the integer program."""
        return Checkmate(backend=self.backend).solve(problem, deadline.within(self.top_seconds))

    def solve_leaf(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve the integer program within a gap of the optimum."""
        return Checkmate(backend=self.backend, gap=GAP).solve(problem, deadline.within(self.leaf_seconds))

    def plan(
        self, problem: Problem, deadline: Deadline, option_table: OptionTable, moves: int
    ) -> tuple[Ints | None, dict[str, int | float | str | bool]]:
        """Plan one level; see `Hierarchical.plan`."""
        groups = grouped(problem.graph, self.segments)
        options = option_table.options(groups, self.group_solver(problem, option_table), deadline.share(0.5))
        chosen = [_spread(found, self.options) for found in options]
        arrays, top_program = flatten(problem.graph), _TopProgram(groups, chosen)
        tops = deadline.share(0.8).within(self.top_seconds)
        order = repair_orders(
            arrays,
            top_program.orders(arrays, problem.budget_nbytes, self.backend, tops),
            problem.budget_nbytes,
            deadline,
            moves,
        )
        return order, {
            "segments": len(groups),
            "options": sum(map(len, chosen)),
            "proven": top_program.proven,
        }

    def below(self) -> "Hilp":
        """The same method for a group, with a share of the time for its own top program."""
        share = None if self.top_seconds is None else self.top_seconds / (self.segments * self.levels)
        return attrs.evolve(self, top_seconds=share)


def _spread(options: Sequence[Option], most: int) -> list[Option]:
    """Keep-all, and the other options that are spread best over their seconds."""
    first, rest = options[0], sorted(options[1:], key=lambda option: option.extra_s)
    if len(rest) >= most:
        rest = [rest[round(i * (len(rest) - 1) / max(1, most - 2))] for i in range(most - 1)]
    return [first, *dict.fromkeys(rest)]


class _TopProgram:
    """The program over whole groups.

    Attributes:
        proven: whether the last result is proven to be the best of its form, or infeasible.
    """

    def __init__(self, groups: Partition, options: Sequence[Sequence[Option]]) -> None:
        self.partition, self.options = groups, options
        self.graph, self.chain = groups.graph, ConservativeChain(groups)
        self.proven = False
        self.sizes = dict(enumerate(self.chain.size))
        self.meaning: list[GroupRun] = []  # per op; the option is -1 if a forward keeps nothing
        self.reads: list[tuple[int, ...]] = []
        self.makes: list[tuple[int, ...]] = []
        self.time_s: list[float] = []
        self.first_s: list[float] = []
        self.workspace: list[int] = []
        self.groups: list[tuple[int, ...]] = []
        self.kept_together: dict[tuple[int, int], int] = {}

    def work(self) -> StagedStep:
        """The step whose ops are groups."""
        count = len(self.partition)
        for s in range(count):
            self.groups.append(self.forward(s))
        for s in range(count - 1, -1, -1):
            self.groups.append(self.backward(s))
        known = {v for values in (*self.reads, *self.makes) for v in values}
        made = {v for values in self.makes for v in values}
        forward = {op for group in self.groups[:count] for op in group}
        return StagedStep(
            groups=tuple(self.groups),
            reads=tuple(self.reads),
            makes=tuple(self.makes),
            time_s=tuple(self.time_s),
            first_s=tuple(self.first_s),
            workspace=tuple(self.workspace),
            repeats=frozenset(forward),
            size={v: self.sizes[v] for v in sorted(known)},
            pinned=frozenset(v for v in made if v < len(self.graph.values) and self.graph.values[v].pinned),
            arriving=frozenset(known - made),
            boundary=count,
        )

    def add(
        self,
        meaning: GroupRun,
        reads: frozenset[int],
        makes: frozenset[int],
        peak: int,
        seconds: tuple[float, float],
    ) -> int:
        self.meaning.append(meaning)
        self.reads.append(tuple(sorted(reads)))
        self.makes.append(tuple(sorted(makes)))
        self.workspace.append(max(0, peak))
        self.first_s.append(seconds[0])
        self.time_s.append(seconds[1])
        return len(self.meaning) - 1

    def total(self, values: frozenset[int]) -> int:
        return sum(self.sizes[v] for v in values)

    def forward(self, s: int) -> tuple[int, ...]:
        """Ops that run a group forward: keeping nothing, or what one option keeps."""
        graph, chain = self.graph, self.chain
        run = self.partition.forward[s]
        inside = {v for op in run for v in graph.ops[op].first.outputs}
        reads = frozenset(v for op in run for v in graph.ops[op].first.inputs) & chain.crossing(s)
        pinned = frozenset(v for v in inside if graph.values[v].pinned)
        passed_on = (chain.crossing(s + 1) & inside) | pinned
        ops = []
        for o, option in [(-1, None), *enumerate(self.options[s])]:
            saved = frozenset[int]() if option is None else option.saved - passed_on
            if option is not None:
                self.kept_together[s, o] = len(self.sizes)
                self.sizes[len(self.sizes)] = self.total(saved)
            makes = passed_on | (frozenset() if option is None else {self.kept_together[s, o]})
            peak = chain.peak(run, frozenset(), passed_on | saved, chain.crossing(s)) - self.total(makes)
            again = chain.again_s[s]
            ops.append(self.add(("forward", s, o), reads, frozenset(makes), peak, (0.0, again)))
        return tuple(ops)

    def backward(self, s: int) -> tuple[int, ...]:
        """Ops that run the backward of a group, one per option."""
        graph, chain = self.graph, self.chain
        ops = []
        for o, option in enumerate(self.options[s]):
            inputs = frozenset(v for op in option.backward for v in graph.ops[op].first.inputs)
            made = frozenset(v for op in option.backward for v in graph.ops[op].first.outputs)
            around = (chain.crossing(s) | chain.crossing(s + 1)) & inputs
            coming = chain.coming[s + 1] & inputs
            passed_on = (chain.coming[s] & made) | {v for v in made if graph.values[v].pinned}
            passed_on -= {v for op in self.partition.forward[s] for v in graph.ops[op].first.outputs}
            start = option.saved | around | coming
            peak = chain.peak(option.backward, start, frozenset(passed_on), frozenset())
            peak -= self.total(start) + self.total(frozenset(passed_on))
            reads = frozenset({self.kept_together[s, o]} | around | coming)
            ops.append(self.add(("backward", s, o), reads, frozenset(passed_on), peak, (option.extra_s, 0.0)))
        return tuple(ops)

    def orders(self, arrays: Arrays, budget_nbytes: int, backend: str, deadline: Deadline) -> Iterator[Ints]:
        """The program's results with larger and larger budgets, at most two."""
        work = self.work()
        unplanned = evaluate(arrays, range(len(arrays.backward))).peak_nbytes
        budgets = np.geomspace(max(1, budget_nbytes), max(1, budget_nbytes, unplanned), TOP_BUDGETS)
        found = 0
        for budget in budgets:
            order = self.solve(
                work, int(budget), backend, deadline.share(1.0 if budget == budgets[-1] else 0.5)
            )
            if order is not None:
                yield order
                found += 1
            if found == 2:
                return

    def solve(self, work: StagedStep, budget_nbytes: int, backend: str, deadline: Deadline) -> Ints | None:
        """The fastest order that the program finds for a budget."""
        try:
            program = stage_program(work, budget_nbytes, deadline)
        except DeadlineReached:
            return None
        found, _, self.proven = minimize_with_cvxpy(
            program, whole=True, solver=backend, deadline=deadline, gap=GAP
        )
        if found is None:
            return None
        runs: list[GroupRun] = []
        for t, frontier in enumerate(work.groups):
            running = [op for group in work.groups[:t] for op in group] + list(frontier)
            for op in running:
                chosen = (t, op) in program.runs and found[program.runs[t, op]] > 0.5
                if work.groups[t] == (op,) or chosen:
                    runs.append(self.meaning[op])
        return np.array(order_of_runs(self.partition, self.options, runs), np.int64)
