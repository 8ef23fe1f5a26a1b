"""How planning grows from 100 to 10,000 ops: equal decoder layers, 60 % of the unplanned peak.

    python benchmarks/growth.py [--json FILE] [--plot FILE]

For each size: the fast bound, the first valid plan and the whole of `auto`, in seconds, and where it ended.
The exit status is not zero if 10,000 ops take more than 60 s.
"""

import argparse
import sys
import time
from pathlib import Path

import attrs
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_graph import noremat_peak_nbytes
from remat_solvers import Deadline, Problem, Progress, get_solver
from remat_solvers.bounds import lower_bound
from remat_solvers.testing import mobile, transformer

LAYERS = (1, 2, 4, 9, 18, 36, 60, 88)
FRACTION = 0.6  # one layer alone cannot do with less than 57 %
LIMIT_S = 60.0


@attrs.frozen(kw_only=True)
class Row:
    """One size."""

    layers: int
    ops: int
    bound_s: float
    first_s: float
    wall_s: float
    overhead_pct: float
    lower_bound_pct: float


def measure(layers: int) -> Row:
    """Plan one size."""
    graph = transformer(layers)
    budget = int(FRACTION * noremat_peak_nbytes(graph))
    start = time.perf_counter()
    lower_bound(graph, budget)
    bound_s = time.perf_counter() - start
    progress: list[Progress] = []
    start = time.perf_counter()
    solution = get_solver("auto").solve(Problem(graph, budget), Deadline(None, on_progress=progress.append))
    wall_s = time.perf_counter() - start
    assert solution.overhead is not None
    return Row(
        layers=layers,
        ops=len(graph.ops),
        bound_s=bound_s,
        first_s=next(step.elapsed_s for step in progress if step.time_s is not None),
        wall_s=wall_s,
        overhead_pct=100 * solution.overhead,
        lower_bound_pct=100 * solution.lower_bound_overhead,
    )


def plot(rows: list[Row], path: Path) -> None:
    """Seconds over ops, both logarithmic."""
    figure = Figure(figsize=(7, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ops = [row.ops for row in rows]
    for label, seconds in (
        ("auto, to the end", [row.wall_s for row in rows]),
        ("first valid plan", [row.first_s for row in rows]),
        ("fast bound", [row.bound_s for row in rows]),
    ):
        axes.loglog(ops, seconds, marker="o", label=label)
    axes.set_xlabel("ops, forward and backward")
    axes.set_ylabel("seconds")
    axes.set_title("Planning equal decoder layers at 60 % of the unplanned peak")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="draw them here (PNG)")
    arguments = parser.parse_args()
    small = mobile(4)  # compiling is once a machine and no part of planning
    for name in ("auto", "search"):
        get_solver(name, moves=1000).solve(Problem(small, int(FRACTION * noremat_peak_nbytes(small))))

    columns = "{:>7}{:>8}{:>10}{:>10}{:>10}{:>13}{:>10}"
    print(columns.format("layers", "ops", "bound s", "first s", "wall s", "overhead %", "bound %"))
    rows = []
    for layers in LAYERS:
        row = measure(layers)
        rows.append(row)
        numbers = (row.bound_s, row.first_s, row.wall_s, row.overhead_pct, row.lower_bound_pct)
        print(columns.format(row.layers, row.ops, *(f"{number:.2f}" for number in numbers)), flush=True)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        record.write(arguments.json, list(map(attrs.asdict, rows)), packages=["remat-solvers", "numba"])
    if rows[-1].wall_s > LIMIT_S:
        print(f"BROKEN: {rows[-1].ops} ops took {rows[-1].wall_s:.1f} s, and {LIMIT_S:.0f} s are promised")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
