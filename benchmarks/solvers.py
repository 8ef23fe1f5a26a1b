"""Solve every graph of a folder at several budgets: feasible or not, overhead, bound, seconds, who won.

    python benchmarks/solvers.py [FOLDER] [--solver auto] [--json FILE]

On the corpus (the default folder) the budgets are the rows of its ``best_known.csv``, and the exit status is
not zero if a promise about them is broken. Other folders of graphs in the corpus format get 70 to 20 %.
Percentages are of the peak of the unplanned step, which on corpus graphs is what a budget in percent means.
"""

import argparse
import csv
import datetime
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import attrs

from remat_graph import Graph, Schedule, simulate
from remat_graph.serialize import load_graph
from remat_solvers import Deadline, Problem, get_solver

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "graphs"
FRACTIONS = (0.7, 0.5, 0.4, 0.3, 0.2)
# (graph, fraction): largest overhead in percent that is promised.
PROMISED = {("gpt2_nohead", 0.4): 12.5, ("unet", 0.5): 11.0}
MAY_FAIL = {("vgg16", 0.5)}


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
    known_bound_pct: float | None = None
    known_best_pct: float | None = None

    def broken(self) -> str:
        """The promise this row breaks, or nothing."""
        key = (self.graph, self.budget_fraction)
        if self.known_best_pct is None:
            return ""
        if self.overhead_pct is None:
            return "" if key in MAY_FAIL else "infeasible, but a schedule is known"
        if self.known_bound_pct is not None and self.overhead_pct < self.known_bound_pct - 0.006:
            return "below the known lower bound"
        if self.lower_bound_pct is not None and self.lower_bound_pct > self.known_best_pct + 0.006:
            return "bound above a known schedule"
        if self.overhead_pct > PROMISED.get(key, float("inf")):
            return f"above the promised {PROMISED[key]} %"
        return ""


def rows_of(folder: Path) -> list[tuple[Path, float, float | None, float | None]]:
    """(graph file, budget fraction, known bound, known best) of every solve to do."""
    known = folder / "best_known.csv"
    if known.exists():
        with known.open() as file:
            return [
                (
                    folder / f"{row['graph']}.json",
                    float(row["budget_fraction"]),
                    float(row["lower_bound_pct"]),
                    float(row["best_found_pct"]),
                )
                for row in csv.DictReader(file)
            ]
    files = sorted(folder.glob("*.json"))
    return [(file, fraction, None, None) for file in files for fraction in FRACTIONS]


def solve_row(
    graph: Graph, fraction: float, solver: str, seconds: float | None, bound: float | None, best: float | None
) -> Row:
    """Solve one graph at one budget; the referee has the last word on the result."""
    peak = simulate(graph, Schedule.from_order(graph, range(len(graph.ops)))).peak_nbytes
    budget = int(fraction * peak)
    first: list[float] = []
    deadline = Deadline(seconds, on_progress=lambda progress: first.append(progress.elapsed_s))
    wall, cpu = time.perf_counter(), time.process_time()
    solution = get_solver(solver).solve(Problem(graph, budget), deadline)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if solution.schedule is not None:
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_nbytes <= budget
        assert timeline.time_s == solution.time_s
    finite = solution.lower_bound_s < float("inf")
    return Row(
        graph=graph.name,
        ops=len(graph.ops),
        budget_fraction=fraction,
        status=solution.status.name,
        overhead_pct=None if solution.overhead is None else 100 * solution.overhead,
        lower_bound_pct=100 * solution.lower_bound_overhead if finite else None,
        wall_s=wall,
        cpu_s=cpu,
        first_s=first[0] if first else None,
        method=str(solution.stats.get("method", solver)),
        known_bound_pct=bound,
        known_best_pct=best,
    )


def shown(number: float | None, digits: int = 2) -> str:
    """A number for the table."""
    return "-" if number is None else f"{number:.{digits}f}"


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CORPUS)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--seconds", type=float, help="deadline of each solve")
    parser.add_argument("--graph", action="append", help="only graphs of this name")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()

    todo = [row for row in rows_of(arguments.folder) if not arguments.graph or row[0].stem in arguments.graph]
    if not todo:
        print(f"no graphs in {arguments.folder}: want *.json in the corpus format", file=sys.stderr)
        return 2
    # Compiling is once a machine and no part of solving.
    warm, fraction, *_ = min(todo, key=lambda row: row[0].stat().st_size)
    start = time.perf_counter()
    get_solver("auto", moves=1000).solve(Problem(load_graph(warm), 1 << 20))
    solve_row(load_graph(warm), fraction, arguments.solver, 2.0, None, None)
    print(f"first use (compiling, if not cached): {time.perf_counter() - start:.1f} s\n")

    header = ("graph", "ops", "budget", "status", "overhead %", "bound %", "known bound", "known best")
    print(
        ("{:<16}{:>6}{:>8} {:<11}" + "{:>12}" * 4 + "{:>8}{:>8}{:>8}  {}").format(
            *header, "wall s", "cpu s", "first s", "method"
        )
    )
    rows, failures = [], []
    graphs: dict[Path, Graph] = {}
    for path, fraction, bound, best in todo:
        graph = graphs.setdefault(path, load_graph(path))
        row = solve_row(graph, fraction, arguments.solver, arguments.seconds, bound, best)
        rows.append(row)
        print(
            ("{:<16}{:>6}{:>7.0f}% {:<11}" + "{:>12}" * 4 + "{:>8.1f}{:>8.1f}{:>8}  {}").format(
                row.graph[:15],
                row.ops,
                100 * row.budget_fraction,
                row.status,
                shown(row.overhead_pct),
                shown(row.lower_bound_pct),
                shown(bound),
                shown(best),
                row.wall_s,
                row.cpu_s,
                shown(row.first_s, 1),
                row.method,
            ),
            flush=True,
        )
        if arguments.solver == "auto" and row.broken():
            failures.append(f"{row.graph} at {100 * fraction:.0f} %: {row.broken()}")
    if arguments.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "remat-solvers": version("remat-solvers"),
            "numba": version("numba"),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps(about | {"rows": [attrs.asdict(row) for row in rows]}, indent=1) + "\n"
        )
    for failure in failures:
        print(f"BROKEN: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
