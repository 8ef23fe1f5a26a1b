"""Checkmate's stage form of rematerialization as a sparse mixed-integer program.

Jain et al. 2020, "Checkmate: breaking the memory wall with optimal tensor rematerialization". The step is cut
into as many stages as it has ops, in trace order: stage t ends with the first run of op t ("frontier
advancing"), and within a stage an op runs at most once, in trace order. Variables, in the paper's names:

* R[t, i]: op i runs in stage t (for i < t a repeat; R[t, t] = 1);
* S[t, v]: value v is live when stage t begins;
* FREE[t, k, v]: v is freed right after op k in stage t;
* U[t, k]: bytes held while op k runs in stage t.

FREE is written pairwise (at most R[t, k], at most 1 - S[t + 1, v], at most 1 - R[t, j] for each later reader
j): its LP is tighter than the paper's counting form, and it needs no integrality of its own. O(n^2) variables
for n ops: about 30,000 at 90 ops.

More general than the paper: memory is per value and not per op, an op may have several outputs, workspace
counts while an op runs, values that cannot be freed are constants. More restricted than the project's
schedules: an op cannot run twice in a stage, and there is no in-place reuse.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from remat_graph import Graph, Placement
from remat_graph.partition import repeatable
from remat_solvers.evaluation.arrays import Floats, Ints
from remat_solvers.protocol import Deadline


@attrs.frozen(kw_only=True, eq=False)
class StageProgram:
    """``minimize cost @ x  subject to  rows @ x <= limits, 0 <= x <= upper``."""

    cost: Floats  # per variable, in units of `unit_s`
    rows: Any  # scipy sparse matrix
    limits: Floats  # right sides
    upper: Floats  # upper bounds
    integral: Ints  # indices of the variables that must be whole: R and S
    # (stage, op) -> variable, for repeats and for frontiers with alternatives
    runs: dict[tuple[int, int], int]
    kept: dict[tuple[int, int], int]  # (stage, value) -> variable
    unit_s: float  # seconds of one unit of cost


class DeadlineReached(Exception):
    """The deadline came while a program was being built."""


@attrs.frozen(kw_only=True, eq=False)
class Choice:
    """Rules for alternatives of which one is in force in the whole step, in first runs and in repeats."""

    together: tuple[tuple[int, ...], ...]  # ops of which all are frontiers of their stages, or none
    exclusive: tuple[tuple[int, int], ...]  # pairs of which at most one is a frontier
    void: frozenset[int]  # ops that run nothing; where one is the frontier, its stage has no other run
    moving: frozenset[int]  # values that different alternatives may compute and that stay from then on


@attrs.frozen(kw_only=True, eq=False)
class StagedStep:
    """The step as the program sees it: ops in order, in groups of alternatives."""

    # per stage the ops that may be its frontier: exactly one of them runs there first
    groups: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]  # per op the values it reads
    makes: tuple[tuple[int, ...], ...]  # per op the values it computes
    time_s: tuple[float, ...]  # per op, seconds of a repeat
    first_s: tuple[float, ...]  # per op, seconds of its first run
    workspace: tuple[int, ...]  # per op, bytes that it needs while it runs
    repeats: frozenset[int]  # ops that may run again
    size: dict[int, int]  # bytes of each value that an op computes or that comes live at the boundary
    pinned: frozenset[int]  # values that stay from their first run on
    # values that no op computes: live from the stage `boundary` on, until they are freed
    arriving: frozenset[int]
    boundary: int  # number of forward groups
    base_nbytes: int = 0  # bytes held throughout
    late_nbytes: int = 0  # bytes held from the stage `boundary` on: tangents that no op reads
    choice: "Choice | None" = None  # rules for alternatives that are chosen once for the whole step

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Per op its stage."""
        found = [0] * len(self.reads)
        for g, ops in enumerate(self.groups):
            for op in ops:
                found[op] = g
        return tuple(found)

    @cached_property
    def makers(self) -> dict[int, list[int]]:
        """Per value the ops that compute it."""
        found: dict[int, list[int]] = {}
        for op, values in enumerate(self.makes):
            for v in values:
                found.setdefault(v, []).append(op)
        return found

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Per value the ops that read it."""
        found: dict[int, list[int]] = {v: [] for v in self.size}
        for op, values in enumerate(self.reads):
            for v in values:
                found[v].append(op)
        return found

    def born(self, v: int) -> int:
        """The first stage that can compute a value."""
        return min((self.group_of[op] for op in self.makers.get(v, ())), default=self.boundary - 1)


def staged_step(graph: Graph) -> StagedStep:
    """A graph with one op a stage."""
    ops, values = graph.ops, graph.values
    made = {
        v for op in ops for v in op.first.outputs if not values[v].external and values[v].placement is None
    }
    read = {v for op in ops for way in op.implementations for v in way.inputs}
    tangents = [v for v in graph.tangents if not values[v].external]
    arriving = frozenset(v for v in tangents if v in read)
    known = made | arriving
    again = [op.implementations[op.rerun] if op.rerun is not None else op.first for op in ops]
    return StagedStep(
        groups=tuple((i,) for i in range(len(ops))),
        # A run is charged for the inputs of both implementations: they differ at most by generator states.
        reads=tuple(
            tuple(sorted({v for way in (op.first, more) for v in way.inputs if v in known}))
            for op, more in zip(ops, again, strict=True)
        ),
        makes=tuple(tuple(v for v in op.first.outputs if v in made) for op in ops),
        time_s=tuple(way.time_s for way in again),
        first_s=tuple(0.0 for _ in ops),
        workspace=tuple(
            max(op.first.workspace_nbytes, way.workspace_nbytes) for op, way in zip(ops, again, strict=True)
        ),
        repeats=frozenset(repeatable(graph, range(len(ops)))),
        size={v: graph.allocated_nbytes(v) for v in sorted(known)},
        pinned=frozenset(v for v in made if values[v].pinned),
        arriving=arriving,
        boundary=sum(not op.backward for op in ops),
        base_nbytes=sum(
            graph.allocated_nbytes(v) for v, value in enumerate(values) if value.placement is Placement.DEVICE
        ),
        late_nbytes=sum(graph.allocated_nbytes(v) for v in tangents if v not in read),
    )


def stage_program(
    work: StagedStep, budget_nbytes: int, deadline: Deadline, *, computations: int | None = None
) -> StageProgram:
    """Build the program for a budget; `computations` limits the runs of an op, the first included.

    Raises:
        DeadlineReached: the deadline came first.
    """
    from scipy.sparse import coo_matrix

    build = _ProgramBuilder(work, budget_nbytes, deadline)
    build.add_choices()
    build.add_dependencies()
    build.add_memory()
    if work.choice is not None:
        build.add_choice(work.choice)
    if computations is not None:
        build.limit_runs(computations - 1)
    rows = coo_matrix(
        (build.entries, (build.row_of, build.column_of)), shape=(len(build.limits), len(build.cost))
    ).tocsr()
    return StageProgram(
        cost=np.array(build.cost),
        rows=rows,
        limits=np.array(build.limits),
        upper=np.array(build.upper),
        integral=np.array(sorted([*build.runs.values(), *build.kept.values()]), np.int64),
        runs=build.runs,
        kept=build.kept,
        unit_s=build.unit_s,
    )


class _ProgramBuilder:
    def __init__(self, work: StagedStep, budget_nbytes: int, deadline: Deadline) -> None:
        self.work, self.budget, self.deadline = work, budget_nbytes, deadline
        self.unit = max(1.0, budget_nbytes / 1000)  # keeps coefficients of similar size
        self.unit_s = sum(work.time_s) / 10_000 or 1.0  # a solver's tolerances are absolute
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.limits: list[float] = []
        self.entries: list[float] = []
        self.row_of: list[int] = []
        self.column_of: list[int] = []
        self.runs: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        for t, frontier in enumerate(work.groups):
            self.check_deadline()
            for op in (op for earlier in work.groups[:t] for op in earlier if op in work.repeats):
                self.runs[t, op] = self.variable(work.time_s[op] / self.unit_s, 1.0)
            if len(frontier) > 1:
                for op in frontier:
                    self.runs[t, op] = self.variable(work.first_s[op] / self.unit_s, 1.0)
            for v in work.size:
                if work.born(v) < t and v not in work.pinned:
                    self.kept[t, v] = self.variable(0.0, 1.0)

    def check_deadline(self) -> None:
        if self.deadline.reached():
            raise DeadlineReached

    def variable(self, cost: float, upper: float) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        """``sum of coefficient * variable <= limit``."""
        place = len(self.limits)
        self.limits.append(limit)
        for column, coefficient in terms:
            self.row_of.append(place)
            self.column_of.append(column)
            self.entries.append(coefficient)

    def run_terms(
        self, t: int, ops: Iterable[int], coefficient: float
    ) -> tuple[list[tuple[int, float]], float]:
        """The sum of R[t, op] as terms and a constant: a frontier without alternatives is 1."""
        terms, constant = [], 0.0
        for op in ops:
            if self.work.groups[t] == (op,):
                constant += coefficient
            elif (t, op) in self.runs:
                terms.append((self.runs[t, op], coefficient))
        return terms, constant

    def running(self, t: int) -> list[int]:
        """The ops that can run in stage t, in order."""
        earlier = [op for group in self.work.groups[:t] for op in group if (t, op) in self.runs]
        return [*earlier, *self.work.groups[t]]

    def add_choices(self) -> None:
        """One alternative is the frontier; at most one is repeated."""
        for t, frontier in enumerate(self.work.groups):
            for group in self.work.groups[: t + 1]:
                columns = [self.runs[t, op] for op in group if (t, op) in self.runs]
                if len(columns) > 1:
                    self.row([(column, 1.0) for column in columns], 1.0)
                    if group is frontier:
                        self.row([(column, -1.0) for column in columns], -1.0)

    def add_dependencies(self) -> None:
        """Inputs are computed in this stage or live before it; live values were computed or live before."""
        work = self.work
        for t in range(len(work.groups)):
            self.check_deadline()
            for op in self.running(t):
                needs, constant = self.run_terms(t, [op], 1.0)
                for v in work.reads[op]:
                    if v in work.pinned and work.born(v) < t:
                        continue
                    made, more = self.run_terms(t, work.makers.get(v, ()), -1.0)
                    held = [(self.kept[t, v], -1.0)] if (t, v) in self.kept else []
                    self.row([*needs, *made, *held], -constant - more)
        for (t, v), column in self.kept.items():
            before = [(self.kept[t - 1, v], -1.0)] if (t - 1, v) in self.kept else []
            if v in work.arriving:
                if before:
                    self.row([(column, 1.0), *before], 0.0)
                continue
            made, constant = self.run_terms(t - 1, work.makers[v], -1.0)
            self.row([(column, 1.0), *made, *before], -constant)

    def add_choice(self, choice: Choice) -> None:
        """One alternative of each group is in force; switches agree; nothing runs in the stage of a void."""
        groups = self.work.groups
        for first, *others in choice.together:
            one = self.runs[self.work.group_of[first], first]
            for op in others:
                other = self.runs[self.work.group_of[op], op]
                self.row([(one, 1.0), (other, -1.0)], 0.0)
                self.row([(one, -1.0), (other, 1.0)], 0.0)
        for pair in choice.exclusive:
            self.row([(self.runs[self.work.group_of[op], op], 1.0) for op in pair], 1.0)
        for (t, op), column in self.runs.items():
            stage = self.work.group_of[op]
            if stage < t and len(groups[stage]) > 1:
                self.row([(column, 1.0), (self.runs[stage, op], -1.0)], 0.0)
            for void in choice.void.intersection(groups[t]) if stage < t else ():
                running, constant = self.run_terms(t, [void], 1.0)
                self.row([(column, 1.0), *running], 1.0 - constant)
        for v in choice.moving:
            for op in self.work.makers[v]:
                stage = self.work.group_of[op]
                for t in range(stage + 1, len(groups)):
                    self.row([(self.runs[stage, op], 1.0), (self.kept[t, v], -1.0)], 0.0)

    def limit_runs(self, repeats: int) -> None:
        """Limit the repeats of each op."""
        columns: dict[int, list[int]] = {}
        for (_, op), column in self.runs.items():
            columns.setdefault(op, []).append(column)
        for found in columns.values():
            if len(found) > repeats:
                self.row([(column, 1.0) for column in found], float(repeats))

    def add_memory(self) -> None:
        """U[t, k] <= budget, with U by recursion over k."""
        work = self.work
        fixed = float(work.base_nbytes)
        moving = frozenset() if work.choice is None else work.choice.moving
        for t, frontier in enumerate(work.groups):
            self.check_deadline()
            held = [(self.kept[t, v], work.size[v] / self.unit) for v in work.size if (t, v) in self.kept]
            before: int | None = None
            freed: list[tuple[int, float]] = []
            late = work.late_nbytes if t >= work.boundary else 0
            stays = {v for op in frontier for v in work.makes[op] if v in work.pinned}
            for k in self.running(t):
                stays_once = work.pinned if k in frontier else work.pinned | moving
                moves = [v for v in work.makes[k] if v not in stays_once]
                runs, constant = self.run_terms(t, [k], sum(work.size[v] for v in moves) / self.unit)
                level = self.variable(0.0, np.inf)
                earlier = held if before is None else [(before, 1.0)]
                # U[t, k] >= held bytes - freed bytes + outputs of op k.
                self.row([*earlier, *freed, *runs, (level, -1.0)], -constant)
                # A pinned value exists once; a repeat that recomputes it holds a second copy while it runs.
                pinned = sum(work.size[v] for v in work.makes[k] if v in stays_once)
                own, twice = (pinned, 0) if k in frontier else (0, pinned)
                workspace, more = self.run_terms(t, [k], (work.workspace[k] + twice) / self.unit)
                limit = (self.budget - fixed - late - own) / self.unit
                self.row([(level, 1.0), *workspace], limit - more)
                freed = [
                    (self.free(t, k, v), -work.size[v] / self.unit)
                    for v in dict.fromkeys([*work.reads[k], *moves])
                    if v not in work.pinned and v not in moving and work.size[v]
                ]
                before = level
            fixed += sum(work.size[v] for v in stays)

    def free(self, t: int, k: int, v: int) -> int:
        """FREE[t, k, v]."""
        work = self.work
        column = self.variable(0.0, 1.0)
        if (t, k) in self.runs:
            self.row([(column, 1.0), (self.runs[t, k], -1.0)], 0.0)
        if (t + 1, v) in self.kept:
            self.row([(column, 1.0), (self.kept[t + 1, v], 1.0)], 1.0)
        for reader in work.readers[v]:
            if work.group_of[k] < work.group_of[reader] <= t:
                terms, constant = self.run_terms(t, [reader], 1.0)
                if terms or constant:
                    self.row([(column, 1.0), *terms], 1.0 - constant)
        return column
