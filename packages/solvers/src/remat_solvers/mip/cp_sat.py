"""Retention intervals in CP-SAT: `moccasin` for a constraint solver, in a process of its own.

Bartan et al. 2023, "Moccasin: efficient tensor rematerialization for neural networks". Time is a row of
events, as the paper numbers them: stage t ends with the first run of op t and has one event for each op up to
t, in trace order, so that events count as (0, 0), (1, 0), (1, 1), (2, 0), ... Op i runs for the first time at
event (i, i) and at most C - 1 times more, at events (t, i) with t > i. Each run opens an interval for each of
its outputs; the intervals of a value do not overlap, and every run that reads a value lies inside one of
them. A cumulative constraint keeps the intervals, and what ops hold only while they run, within the budget at
every event. O(C * n) intervals and O(C^2) choices a read, against O(n^2) variables of the stage program.

The space is restricted in the same way as in `stage_program`: first runs in trace order, an op at most once a
stage and C times in all, no reuse in place. Times are rounded to billionths of the step's.

ortools and HiGHS do not share a process (their symbols clash), and CP-SAT can run out of memory, so the model
is written and solved by ``python -m remat_solvers.mip.cp_sat``: a problem as JSON on stdin, an order as JSON
on stdout. One worker, a fixed seed and a limit in CP-SAT's own deterministic units give the same order every
time unless the clock cuts in.
"""

import json
import sys
import warnings
from importlib.util import find_spec
from math import gcd
from typing import Any

import attrs

from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_solvers.bounds import budget_floor
from remat_solvers.errors import BadParameter, SolverWarning
from remat_solvers.mip.stage_program import StagedStep, staged_step
from remat_solvers.protocol import Deadline, Problem, Solution, judge
from remat_solvers.running.subprocess_json import NO_ORDER, order_of_ops, run_json_module

WORK = 600.0  # work limit in CP-SAT's deterministic units: about a second each
GRACE_S = 5.0  # beyond the deadline, to start the process and to read its result
TICKS = 10**9  # of the time of all ops: CP-SAT counts in whole numbers
LARGEST = 2**40  # memory units are at least the budget divided by this, which keeps products in 64 bits


def solve_intervals(problem: Problem, deadline: Deadline, computations: int) -> Solution:
    """Let CP-SAT solve a problem in its process, with at most `computations` runs of an op.

    The referee judges the result; a process that hangs is ended soon after the deadline.

    Raises:
        BadParameter: ortools is not installed.
    """
    if find_spec("ortools") is None:
        raise BadParameter(
            solver="moccasin",
            problem="backend 'CP-SAT' needs ortools: run pip install 'remat-solvers[cpsat]'",
        )
    if problem.budget_nbytes < budget_floor(problem.graph).nbytes:
        return judge(problem, None, stats={"proven": True})
    if deadline.reached():
        return judge(problem, None, stats={"proven": False})
    limited = deadline.seconds is not None
    request = {
        "graph": graph_to_data(problem.graph),
        "budget_nbytes": problem.budget_nbytes,
        "computations": computations,
        "seconds": deadline.remaining_s if limited else None,
    }
    most_s = deadline.remaining_s + GRACE_S
    reply, failure = run_json_module("remat_solvers.mip.cp_sat", request, most_s, deadline)
    order, proven = None, False
    if not failure:
        try:
            order, proven = order_of_ops(reply["order"], problem), bool(reply["proven"])
        except (ValueError, KeyError, TypeError):
            failure = NO_ORDER
    if failure and not deadline.reached():
        warnings.warn(f"CP-SAT {failure}", SolverWarning, stacklevel=2)
    if limited and not proven:
        deadline.reached()
    return judge(problem, order, stats={"proven": proven})


@attrs.frozen(kw_only=True, eq=False)
class _RunVariables:
    """Variables of one run of an op: its event, and whether it takes place."""

    start: Any
    active: Any


@attrs.frozen(kw_only=True, eq=False)
class _IntervalVariables:
    """Variables of one interval: the value is held from `start` to before `end` if `active`."""

    start: Any
    end: Any
    active: Any


def _event(stage: int, op: int) -> int:
    return stage * (stage + 1) // 2 + op


class _Model:
    """The model for a step, a budget and a number of computations."""

    def __init__(self, work: StagedStep, budget_nbytes: int, computations: int) -> None:
        from ortools.sat.python import cp_model

        self.work, self.computations = work, computations
        self.model = cp_model.CpModel()
        self.always = self.model.new_constant(1)
        self.horizon = _event(len(work.reads), 0)
        self.held: list[tuple[Any, int]] = []  # intervals of the model and their bytes
        self.last = self._last_stages()
        self.runs = [self._runs(op) for op in range(len(work.reads))]
        self.intervals = {v: self._intervals(v) for v in work.size}
        for op, runs in enumerate(self.runs):
            for run in runs:
                self._hold(run.start, 1, run.start + 1, run.active, work.workspace[op])
                for v in work.reads[op]:
                    if v not in work.pinned:
                        self._be_held(run, v)
        boundary = _event(work.boundary, 0)
        if boundary < self.horizon:
            self._hold(boundary, self.horizon - boundary, self.horizon, self.always, work.late_nbytes)
        self.exact = self._limit_memory(budget_nbytes)
        self._minimize_time()

    def _last_stages(self) -> list[int]:
        """Per op the last stage in which a run of it is useful."""
        work = self.work
        last = list(range(len(work.reads)))
        for op in reversed(last):
            if op in work.repeats:
                readers = [r for v in work.makes[op] if v not in work.pinned for r in work.readers[v]]
                last[op] = max((last[r] for r in readers), default=op)
        return last

    def _runs(self, op: int) -> list[_RunVariables]:
        """The first run at its fixed event, and others, each after the one before."""
        from ortools.sat.python import cp_model

        runs = [_RunVariables(start=self.model.new_constant(_event(op, op)), active=self.always)]
        events = [_event(t, op) for t in range(op + 1, self.last[op] + 1)]
        for c in range(min(self.computations - 1, len(events))):
            start = self.model.new_int_var_from_domain(cp_model.Domain.from_values(events), f"start {op} {c}")
            active = self.model.new_bool_var(f"active {op} {c}")
            self.model.add(runs[-1].start < start).only_enforce_if(active)
            self.model.add_implication(active, runs[-1].active)
            runs.append(_RunVariables(start=start, active=active))
        return runs

    def _intervals(self, v: int) -> list[_IntervalVariables]:
        """One interval for each run of the op that computes the value."""
        work = self.work
        if v in work.arriving:
            runs = [
                _RunVariables(start=self.model.new_constant(_event(work.boundary, 0)), active=self.always)
            ]
        else:
            runs = self.runs[work.makers[v][0]]
        if v in work.pinned:  # held from the first run on; a repeat makes a second copy, freed at once
            for run in runs:
                end = self.horizon if run is runs[0] else run.start + 1
                self._hold(run.start, end - run.start, end, run.active, work.size[v])
            return []
        found: list[_IntervalVariables] = []
        for run in runs:
            end = self.model.new_int_var(0, self.horizon, f"end {v}")
            size = self.model.new_int_var(1, self.horizon if work.readers[v] else 1, f"size {v}")
            if found:
                self.model.add(found[-1].end <= run.start).only_enforce_if(run.active)
            self._hold(run.start, size, end, run.active, work.size[v])
            found.append(_IntervalVariables(start=run.start, end=end, active=run.active))
        return found

    def _be_held(self, run: _RunVariables, v: int) -> None:
        """Require that the value is held in one of its intervals while the run takes place."""
        inside = []
        for interval in self.intervals[v]:
            chosen = self.model.new_bool_var("")
            self.model.add_implication(chosen, interval.active)
            # An arriving value is live at the event itself, the output of an op from the next event on.
            arrived = int(v in self.work.arriving)
            self.model.add(interval.start < run.start + arrived).only_enforce_if(chosen)
            self.model.add(run.start < interval.end).only_enforce_if(chosen)
            inside.append(chosen)
        self.model.add_exactly_one([run.active.negated(), *inside])

    def _hold(self, start: Any, size: Any, end: Any, active: Any, nbytes: int) -> None:
        """Hold bytes in an interval, which is part of the model even if it is empty."""
        interval = self.model.new_optional_interval_var(start, size, end, active, "")
        if nbytes:
            self.held.append((interval, nbytes))

    def _limit_memory(self, budget_nbytes: int) -> bool:
        """Limit memory in common units, rounded up where bytes are many; whether nothing was rounded."""
        common = gcd(*(nbytes for _, nbytes in self.held)) or 1
        unit = max(common, -(-budget_nbytes // LARGEST))
        self.model.add_cumulative(
            [interval for interval, _ in self.held],
            [-(-nbytes // unit) for _, nbytes in self.held],
            (budget_nbytes - self.work.base_nbytes) // unit,
        )
        return unit == common

    def _minimize_time(self) -> None:
        unit_s = sum(self.work.time_s) / TICKS or 1.0
        self.model.minimize(
            sum(
                round(self.work.time_s[op] / unit_s) * run.active
                for op, runs in enumerate(self.runs)
                for run in runs[1:]
            )
        )

    def solve(self, deadline: Deadline) -> dict[str, Any]:
        """The ops in order, or None, and whether no order of this form is better."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = WORK
        if deadline.seconds is not None:
            solver.parameters.max_time_in_seconds = deadline.remaining_s
        status = solver.solve(self.model)
        proven = self.exact and status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return {"order": None, "proven": proven}
        events = [
            (solver.value(run.start), op)
            for op, runs in enumerate(self.runs)
            for run in runs
            if solver.value(run.active)
        ]
        return {"order": [op for _, op in sorted(events)], "proven": proven}


def main() -> None:
    """Read a request from stdin and write the result as the last line of stdout."""
    request = json.load(sys.stdin)
    deadline = Deadline(request["seconds"])
    work = staged_step(graph_from_data(request["graph"]))
    found = _Model(work, request["budget_nbytes"], request["computations"]).solve(deadline)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
