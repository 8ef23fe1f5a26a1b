"""Solve every graph of a folder at several budgets: feasible or not, overhead, bound, seconds, who won.

    python benchmarks/solvers.py [FOLDER] [--solver auto] [--bound tight] [--json FILE]

On the corpus (the default folder) the budgets are the rows of its ``best_known.csv``; other folders of
graphs in the corpus format get 70 to 20 %, and 1.5 times what the largest op alone holds. Percentages are of
the peak of the unplanned step, which on corpus graphs is what a budget in percent means. What is promised of
`auto` (`Row.broken`) is checked, and the exit status is not zero if a promise is broken.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_graph import Graph, load_graph, noremat_peak_nbytes, simulate
from remat_solvers import Deadline, Problem, Progress, Status, get_solver
from remat_solvers.bounds import lower_bound, tight_bound
from remat_solvers.bounds.budget_bound import working_values
from remat_solvers.bounds.reachability import reachability
from remat_solvers.testing import mobile

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "graphs"
TIGHTEST = {
    "gpt2": 0.553,
    "gpt2_nohead": 0.07,
}  # budgets beside the corpus' own, to be met
FRACTIONS = (0.7, 0.5, 0.4, 0.3, 0.2)
TIMED_OPS = 3000  # up to this size there are promises about time:
FIRST_S = 2.0  # a first valid plan
SMALL = 600  # ops up to which ...
SECONDS = {True: 10.0, False: 120.0}  # ... a budget of 40 % or more takes so long, and a lower one
LARGE_SECONDS = 30.0  # for 40 % or more of larger graphs
BOUND_S = {True: 2.0, False: 6.0}  # the fast bound, of a small graph and of a larger one


@attrs.frozen(kw_only=True)
class Row:
    """One solve."""

    graph: str
    ops: int
    budget_fraction: float
    status: str
    overhead_pct: float | None
    lower_bound_pct: float | None
    wall_s: float
    cpu_s: float
    first_s: float | None
    method: str
    goal_s: float | None
    bound_s: float
    known_bound_pct: float | None = None
    known_best_pct: float | None = None
    tight: bool = False

    @property
    def goal_pct(self) -> float | None:
        """The overhead that is promised: so many points above the bound, or above the best that is known."""
        if self.budget_fraction < 0.295:
            return None if self.known_best_pct is None else self.known_best_pct + 3.0
        if self.lower_bound_pct is None:
            return None
        return self.lower_bound_pct + (1.0 if self.budget_fraction > 0.395 else 2.5)

    def broken(self) -> list[str]:
        """The promises that this row breaks."""
        found = []
        if self.overhead_pct is None:
            if self.known_best_pct is not None:
                found.append("infeasible, but a schedule is known")
            elif self.status != Status.INFEASIBLE.name:
                found.append("nothing found, and no certificate that nothing is there")
            return found
        if self.goal_pct is not None and self.overhead_pct > self.goal_pct:
            found.append(f"above {self.goal_pct:.2f} %, which is promised")
        if self.known_best_pct is not None:
            if self.overhead_pct > self.known_best_pct + (3.0 if self.budget_fraction < 0.295 else 0.3):
                found.append("loses to the best known")
            if self.lower_bound_pct is not None and self.lower_bound_pct > self.known_best_pct + 0.006:
                found.append("bound above a known schedule")
        if self.known_bound_pct is not None:
            if self.overhead_pct < self.known_bound_pct - 0.006:
                found.append("below the known lower bound")
            if self.tight and (self.lower_bound_pct or 0.0) < 0.9 * self.known_bound_pct:
                found.append("a tight bound below 0.9 of the known one")
        return found + self.slow()

    def slow(self) -> list[str]:
        """The promises about time that this row breaks."""
        found: list[str] = []
        generous = self.budget_fraction > 0.395
        if self.ops > TIMED_OPS:
            return found
        limit = SECONDS[generous] if self.ops <= SMALL else LARGE_SECONDS if generous else None
        if limit is not None and self.goal_pct is not None and not (self.goal_s or 0.0) <= limit:
            found.append(f"what is promised took {self.goal_s:.1f} s")
        if self.first_s is not None and self.first_s > FIRST_S:
            found.append(f"a first plan took {self.first_s:.1f} s")
        if self.bound_s > BOUND_S[self.ops <= SMALL]:
            found.append(f"the fast bound took {self.bound_s:.1f} s")
        return found


def rows_of(folder: Path) -> list[tuple[Path, float | None, float | None, float | None]]:
    """(graph file, budget fraction, known bound, known best) of every solve to do.

    No fraction stands for 1.5 times what the largest op alone holds.
    """
    known = folder / "best_known.csv"
    if known.exists():
        with known.open() as file:
            rows: list[tuple[Path, float | None, float | None, float | None]] = [
                (
                    folder / f"{row['graph']}.json",
                    float(row["budget_fraction"]),
                    float(row["lower_bound_pct"]),
                    float(row["best_found_pct"]),
                )
                for row in csv.DictReader(file)
            ]
        tight = [(folder / f"{name}.json", fraction, None, None) for name, fraction in TIGHTEST.items()]
        return rows + [row for row in tight if row[0].exists()]
    files = sorted(folder.glob("*.json"))
    return [(file, fraction, None, None) for file in files for fraction in (*FRACTIONS, None)]


def budget_of(graph: Graph, fraction: float | None) -> tuple[int, float]:
    """Bytes, and the fraction of the unplanned peak that they are."""
    peak = noremat_peak_nbytes(graph)
    if fraction is None:
        reach = reachability(graph)
        runs = [op.first for op in graph.ops]
        most = max(sum(working_values(graph, run, reach).values()) + run.workspace_nbytes for run in runs)
        nbytes = min(peak, 3 * most // 2)
        return nbytes, nbytes / peak
    return int(fraction * peak), fraction


def solve_row(
    graph: Graph,
    fraction: float | None,
    arguments: argparse.Namespace,
    bound: float | None,
    best: float | None,
) -> Row:
    """Solve one graph at one budget; the referee has the last word on the result."""
    budget, fraction = budget_of(graph, fraction)
    start = time.perf_counter()
    bound_overhead = lower_bound(graph, budget) / graph.time_s - 1.0
    bound_s = time.perf_counter() - start
    progress: list[Progress] = []
    deadline = Deadline(arguments.seconds, on_progress=progress.append)
    wall, cpu = time.perf_counter(), time.process_time()
    solution = get_solver(arguments.solver).solve(Problem(graph, budget), deadline)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if solution.schedule is not None:
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_nbytes <= budget
        assert timeline.time_s == solution.time_s
    bound_overhead = max(bound_overhead, solution.lower_bound_overhead)
    if arguments.bound == "tight" and solution.status is not Status.OPTIMAL:
        tight = tight_bound(graph, budget, Deadline(arguments.bound_seconds))
        bound_overhead = max(bound_overhead, tight / graph.time_s - 1.0)
    row = Row(
        graph=graph.name,
        ops=len(graph.ops),
        budget_fraction=fraction,
        status=solution.status.name,
        overhead_pct=None if solution.overhead is None else 100 * solution.overhead,
        lower_bound_pct=100 * bound_overhead if bound_overhead < float("inf") else None,
        wall_s=wall,
        cpu_s=cpu,
        first_s=next((step.elapsed_s for step in progress if step.time_s is not None), None),
        method=str(solution.stats.get("method", arguments.solver)),
        goal_s=None,
        bound_s=bound_s,
        known_bound_pct=bound,
        known_best_pct=best,
        tight=arguments.bound == "tight",
    )
    good = [
        step.elapsed_s
        for step in progress
        if row.goal_pct is not None
        and step.time_s is not None
        and 100 * (step.time_s / graph.time_s - 1.0) <= row.goal_pct
    ]
    return attrs.evolve(row, goal_s=good[0] if good else None)


def beaten(rows: list[Row]) -> str:
    """On how many of the rows with a known gap above 0.1 the best known is beaten by 0.05."""
    count = won = 0
    for row in rows:
        best, bound = row.known_best_pct, row.known_bound_pct
        if best is not None and bound is not None and best - bound > 0.1:
            count += 1
            won += row.overhead_pct is not None and row.overhead_pct <= best - 0.05
    return f"{won} of {count} rows with a known gap above 0.1 are beaten by 0.05 or more"


def shown(number: float | None, digits: int = 2) -> str:
    """A number for the table."""
    return "-" if number is None else f"{number:.{digits}f}"


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CORPUS)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--seconds", type=float, help="deadline of each solve")
    parser.add_argument("--bound", choices=("fast", "tight"), default="fast", help="tight: minutes a row")
    parser.add_argument("--bound-seconds", type=float, default=60.0, help="deadline of a tight bound")
    parser.add_argument("--graph", action="append", help="only graphs of this name")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()

    todo = [row for row in rows_of(arguments.folder) if not arguments.graph or row[0].stem in arguments.graph]
    if not todo:
        print(f"no graphs in {arguments.folder}: want *.json in the corpus format", file=sys.stderr)
        return 2
    # Compiling is once a machine and no part of solving.
    start = time.perf_counter()
    small = mobile(4)
    for method in (get_solver("auto", moves=1000), get_solver("search", moves=1000)):
        method.solve(Problem(small, budget_of(small, 0.6)[0]))
    print(f"first use (compiling, if not cached): {time.perf_counter() - start:.1f} s\n")

    header = ("graph", "ops", "budget", "status", "overhead %", "bound %", "known bound", "known best")
    columns = "{:<16}{:>6}{:>8} {:<11}" + "{:>12}" * 4 + "{:>8}" * 5 + "  {}"
    print(columns.format(*header, "wall s", "cpu s", "first s", "goal s", "bound s", "method"))
    rows, failures = [], []
    graphs: dict[Path, Graph] = {}
    for path, fraction, bound, best in todo:
        graph = graphs.setdefault(path, load_graph(path))
        row = solve_row(graph, fraction, arguments, bound, best)
        rows.append(row)
        print(
            columns.format(
                row.graph[:15],
                row.ops,
                f"{100 * row.budget_fraction:.0f}%",
                row.status,
                shown(row.overhead_pct),
                shown(row.lower_bound_pct),
                shown(bound),
                shown(best),
                shown(row.wall_s, 1),
                shown(row.cpu_s, 1),
                shown(row.first_s, 1),
                shown(row.goal_s, 1),
                shown(row.bound_s, 2),
                row.method,
            ),
            flush=True,
        )
        if arguments.solver == "auto":
            failures += [f"{row.graph} at {100 * row.budget_fraction:.0f} %: {what}" for what in row.broken()]
    if any(row.known_best_pct is not None for row in rows):
        print(beaten(rows))
    if arguments.json:
        packages = ["remat-solvers", "numba", "highspy"]
        record.write(arguments.json, list(map(attrs.asdict, rows)), packages=packages)
    for failure in failures:
        print(f"BROKEN: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
