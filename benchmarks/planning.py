"""How long planning takes, how soon there is a plan, how good it is: by model and budget, from one run.

    python benchmarks/planning.py [MODEL ...] [--budgets 100%,60%,40%,30%,20%,smallest,tight]
        [--limits 1,3,10] [--prove SECONDS] [--busy] [--before FILE] [--json FILE] [--resume] [--plot FILE]

Models: those of `planning_models.py`. Each budget is planned by the planner that `Hiremate` calls, without
saved plans, from the captured and measured graph to the plan; where nothing fits, to the error that names a
smaller budget. `smallest` is the least budget for which `min_budget` finds a plan, and `tight` is 1.1 times
that of the file `--before`, whose rows are of an earlier version and which is compared row by row.

Columns: seconds by the clock and of the processor, seconds until the first valid plan, overhead, lower bound.
With `--limits`, each budget is planned again with these limits in seconds, and the time over a limit counts.
With `--prove`, the bound of a plan that is far from it is raised for so many seconds more, as `remat solve
--prove` does, beside the columns of the plan. With `--busy`, a second process keeps a processor busy
meanwhile. With `--resume`, models with all of their rows in FILE are not planned again. `--plot` draws the
best overhead and the bound over time, of ten graphs at 40 %.

The exit status is not zero if a row takes longer than it may (20 s up to 1,000 ops, 30 s at 2,700, 60 s at
10,000), if a limit is passed by more than half a second, or if a plan is slower than before by more than 0.2
points of the step, or all of them together are.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import planning_curves, planning_models, record
from remat_facade.planning.method import Method
from remat_facade.planning.plan_search import PlanSearch
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.saved_bound import raised_bound
from remat_graph import Graph, resolve_budget
from remat_solvers import Deadline, InfeasibleBudget, compile_loops, min_budget
from remat_solvers import Progress as SolverProgress

BUDGETS = ("100%", "60%", "40%", "30%", "20%", "smallest", "tight")
MAY_TAKE_OPS, MAY_TAKE_S = (1_000, 2_700, 10_000), (20.0, 30.0, 60.0)
LATE_S = 0.5
WORSE = 2e-3
TIGHT = 1.1
NEAR, NEAR_TIGHT = 0.01, 0.025
"""The gaps that plans should keep, down to 30 % of memory and below."""


@attrs.frozen(kw_only=True)
class Row:
    """One budget of one model.

    Attributes:
        model: its name.
        ops: of the graph.
        budget: as in `BUDGETS`.
        nbytes: the same in bytes.
        limit_s: given to the planner, or None.
        wall_s, cpu_s: from the graph to the plan or the error.
        first_s: until the first valid plan; None if there is none.
        overhead: of the plan on the step with all ways off, as a ratio; None without a plan.
        bound: a lower bound on it.
        cut: whether a limit by the clock ended the search.
        smallest_nbytes: the budget that the error names.
        proven: the bound after the seconds of `--prove`; None if it was near enough without them.
        curve: whenever the best plan or the bound has changed: seconds, overhead or None, bound.
    """

    model: str
    ops: int
    budget: str
    nbytes: int
    limit_s: float | None
    wall_s: float
    cpu_s: float
    first_s: float | None
    overhead: float | None
    bound: float | None
    cut: bool
    smallest_nbytes: int | None
    curve: list[tuple[float, float | None, float]] = attrs.field(factory=list)
    proven: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What rows of two runs are matched by."""
        return self.model, self.budget


@attrs.define(kw_only=True)
class _Watched(RecomputePlanner):
    """A planner that notes the best plan and the bound over time."""

    curve: list[tuple[float, float | None, float]] = attrs.field(factory=list)

    def search(self, graph: Graph, budget_nbytes: int, limit_s: float | None, passes: int = 1) -> PlanSearch:
        """A search whose progress is noted."""
        found = super().search(graph, budget_nbytes, limit_s, passes)
        shown, began_s = found.deadline.on_progress, time.perf_counter()

        def watch(progress: SolverProgress) -> None:
            best = None if progress.time_s is None else progress.time_s / graph.time_s - 1
            bound = min(progress.lower_bound_s / graph.time_s - 1, sys.float_info.max)
            if not self.curve or (best, bound) != self.curve[-1][1:]:
                self.curve.append((time.perf_counter() - began_s, best, bound))
            if shown is not None:
                shown(progress)

        found.deadline.on_progress = watch
        return found


def near(budget: str) -> float:
    """The gap that plans should keep at a budget."""
    return NEAR if budget in ("100%", "60%", "40%", "30%") else NEAR_TIGHT


def planned(name: str, graph: Graph, budget: str, nbytes: int, limit_s: float | None, prove_s: float) -> Row:
    """Plan a graph once."""
    planner = _Watched(budget=nbytes, method=Method(time_limit_s=limit_s))
    began_s, worked_s = time.perf_counter(), time.process_time()
    plan = smallest_nbytes = None
    try:
        plan = planner(graph)
    except InfeasibleBudget as error:
        smallest_nbytes = error.smallest_nbytes
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - worked_s
    first_s = next((at_s for at_s, best, _ in planner.curve if best is not None), wall_s)
    proven = None
    if plan is not None and prove_s and plan.gap > near(budget):
        proven = raised_bound(graph, plan, Deadline(prove_s)).lower_bound_overhead
    return Row(
        model=name,
        ops=len(graph.ops),
        budget=budget,
        nbytes=nbytes,
        limit_s=limit_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
        first_s=None if plan is None else first_s,
        overhead=None if plan is None else plan.overhead,
        bound=None if plan is None else plan.lower_bound_overhead,
        cut=plan is not None and plan.deadline_hit,
        smallest_nbytes=smallest_nbytes,
        curve=planner.curve,
        proven=proven,
    )


def smallest(name: str, graph: Graph) -> Row:
    """The search for the smallest budget."""
    began_s, worked_s = time.perf_counter(), time.process_time()
    found = min_budget(graph)
    return Row(
        model=name,
        ops=len(graph.ops),
        budget="search",
        nbytes=found.proven_nbytes,
        limit_s=None,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - worked_s,
        first_s=None,
        overhead=None,
        bound=None,
        cut=found.cut_short,
        smallest_nbytes=found.nbytes,
    )


def rows(
    names: list[str],
    budgets: list[str],
    limits: list[float],
    prove_s: float,
    before: dict[tuple[str, str], Row],
) -> Iterator[Row]:
    """Every model at every budget."""
    for name, graph in planning_models.graphs(names):
        searched = smallest(name, graph) if {"smallest", "tight"} & set(budgets) else None
        if searched is not None:
            yield searched
        for budget in budgets:
            if budget in ("smallest", "tight"):
                assert searched is not None
                assert searched.smallest_nbytes is not None
                nbytes = searched.smallest_nbytes
            else:
                nbytes = resolve_budget(budget, graph)
            if budget == "tight":
                earlier = before.get((name, "search"))
                nbytes = int(TIGHT * ((earlier and earlier.smallest_nbytes) or nbytes))
            for limit_s in (None, *limits):
                proving_s = prove_s if limit_s is None else 0.0
                yield planned(name, graph, budget, nbytes, limit_s, proving_s)


def may_take_s(ops: int) -> float:
    """The longest that a plan may take, linear between the sizes of `MAY_TAKE_OPS`."""
    return float(np.interp(ops, MAY_TAKE_OPS, MAY_TAKE_S))


def judge(found: list[Row], before: dict[tuple[str, str], Row]) -> list[str]:
    """What is wrong."""
    wrong = []
    earlier_sum = sum_now = 0.0
    for row in found:
        here = f"{row.model} at {row.budget}"
        if row.limit_s is None and row.wall_s > may_take_s(row.ops):
            wrong.append(f"{here}: {row.wall_s:.1f} s for {row.ops} ops")
        if row.limit_s is not None and row.wall_s > row.limit_s + LATE_S:
            wrong.append(f"{here}: {row.wall_s:.1f} s with a limit of {row.limit_s:g} s")
        earlier = before.get(row.key)
        if row.limit_s is not None or earlier is None or earlier.overhead is None:
            continue
        if row.budget == "smallest" and row.nbytes < earlier.nbytes:
            continue  # a smaller budget than before, so the overheads do not compare
        if row.overhead is None:
            wrong.append(f"{here}: no plan, and {earlier.overhead:+.2%} before")
            continue
        earlier_sum, sum_now = earlier_sum + earlier.overhead, sum_now + row.overhead
        if row.overhead > earlier.overhead + WORSE:
            wrong.append(f"{here}: {row.overhead:+.2%}, and {earlier.overhead:+.2%} before")
    if sum_now > earlier_sum:
        wrong.append(f"all overheads together: {sum_now:.2%}, and {earlier_sum:.2%} before")
    return wrong


def summary(found: list[Row], before: dict[tuple[str, str], Row]) -> str:
    """Medians and sums of both sides."""
    free = [row for row in found if row.limit_s is None and row.budget != "search"]
    lines = []
    if free:
        walls = sorted(row.wall_s for row in free)
        firsts = [row.first_s for row in free if row.first_s is not None and row.ops <= MAY_TAKE_OPS[0]]
        lines.append(
            f"{len(free)} plans: median {statistics.median(walls):.2f} s, longest {walls[-1]:.1f} s, "
            f"processor {sum(row.cpu_s for row in free):.0f} s; first plan up to 1,000 ops after at most "
            f"{max(firsts, default=0.0):.2f} s"
        )
    pairs = [(row, before[row.key]) for row in free if row.key in before]
    if pairs:
        walls = sorted(old.wall_s for _, old in pairs)
        lines.append(
            f"before: median {statistics.median(walls):.2f} s, longest {walls[-1]:.1f} s, "
            f"processor {sum(old.cpu_s for _, old in pairs):.0f} s"
        )
    return "\n".join(lines)


def shown(row: Row, earlier: Row | None) -> str:
    """A line of the table."""
    limit = "" if row.limit_s is None else f"{row.limit_s:g} s"
    first = "-" if row.first_s is None else f"{row.first_s:.2f}"
    ratios = (row.overhead, row.bound, row.proven)
    cells = [f"{'-' if each is None else f'{each:+.2%}':>9}" for each in ratios]
    old = "-" if earlier is None or earlier.overhead is None else f"{earlier.overhead:+.2%}"
    took = "-" if earlier is None else f"{earlier.wall_s:.1f}"
    return (
        f"{row.model:20} {row.ops:5} {row.budget:8} {limit:>5} {row.nbytes / 2**20:9.1f} {row.wall_s:7.2f} "
        f"{row.cpu_s:7.2f} {first:>6} {' '.join(cells)} {'cut' if row.cut else '':3} {old:>9} {took:>7}"
    )


def load(path: Path | None) -> list[Row]:
    """The rows of an earlier run."""
    if path is None or not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def complete(rows: list[Row], budgets: list[str], limits: list[float]) -> list[Row]:
    """The rows of the models that have one for every budget and limit."""
    known = {(row.model, row.budget, row.limit_s) for row in rows}
    wanted = list(itertools.product(budgets, (None, *limits)))
    return [row for row in rows if all((row.model, *each) in known for each in wanted)]


def _spin() -> None:
    while True:
        pass


def main() -> int:
    """Print the table; 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="all by default")
    parser.add_argument("--budgets", default=",".join(BUDGETS), help="separated by commas")
    parser.add_argument("--limits", default="", help="seconds, separated by commas")
    parser.add_argument("--prove", type=float, default=0.0, help="seconds for bounds that are far")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps a processor busy")
    parser.add_argument("--before", type=Path, help="rows of an earlier version")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--resume", action="store_true", help="go on from that file")
    parser.add_argument("--plot", type=Path, help="draw overhead and bound over time here")
    options = parser.parse_args()
    budgets = options.budgets.split(",")
    if options.prove < 0:
        parser.error(f"--prove takes seconds; got {options.prove:g}")
    if not set(BUDGETS).issuperset(budgets):
        parser.error(f"the budgets are {', '.join(BUDGETS)}; got {options.budgets}")
    if not set(planning_models.NAMES).issuperset(options.models):
        unknown = set(options.models) - set(planning_models.NAMES)
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    compile_loops()  # once for an installation, and no part of planning
    before = {row.key: row for row in load(options.before) if row.limit_s is None}
    limits = [float(limit) for limit in options.limits.split(",") if limit]
    busy: Any = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    if options.busy:
        busy.start()
    print(
        f"{'model':20} {'ops':>5} {'budget':8} {'limit':>5} {'MiB':>9} {'wall s':>7} {'cpu s':>7} "
        f"{'first':>6} {'overhead':>9} {'bound':>9} {'proven':>9}     {'before':>9} {'took s':>7}"
    )
    found = complete(load(options.json), budgets, limits) if options.resume else []
    done = {row.model for row in found}
    names = [name for name in options.models or planning_models.NAMES if name not in done]
    for row in rows(names, budgets, limits, options.prove, before) if names else ():
        found.append(row)
        print(shown(row, before.get(row.key)), flush=True)
        if options.json:
            packages = ("torch", "transformers", "torchvision", "timm", "highspy", "numba")
            written = [attrs.asdict(each) for each in found]
            extra = {"busy": options.busy, "prove_s": options.prove}
            record.write(options.json, written, packages=packages, **extra)
    if options.busy:
        busy.terminate()
    if options.plot:
        planning_curves.draw([row for row in found if row.limit_s is None], options.plot)
    print(summary(found, before))
    wrong = judge(found, before)
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
