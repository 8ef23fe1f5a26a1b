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
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_facade.report.picture import WIDE, Look, annotate, headline, new_figure, png, style_axes
from remat_graph import noremat_peak_nbytes
from remat_graph.serialization.outputs import write_whole
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


def draw_growth(rows: list[Row], look: Look = WIDE) -> Figure:
    """Seconds over ops, both logarithmic, with the names of the curves at their ends."""
    last = rows[-1]
    curves = {
        "in all": ([row.wall_s for row in rows], look.palette.planned),
        "bound": ([row.bound_s for row in rows], look.palette.moved),
        "first plan": ([row.first_s for row in rows], look.palette.repeat),
    }
    with new_figure(look, 4.4 if look.narrow else 5.6) as figure:
        title = f"{last.ops:,} ops: planned in {last.wall_s:.0f} s, a first plan after {last.first_s:.1f} s"
        about = "equal decoder layers in 60 % of the unplanned peak, both axes logarithmic"
        frame = headline(figure, look, title, about)
        frame.right += 0.7
        axes = figure.add_subplot(figure.add_gridspec(1, 1, **frame.fractions())[0])
        style_axes(axes, frame)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for name, (seconds, colour) in curves.items():
            axes.plot([row.ops for row in rows], seconds, color=colour, lw=1.8, marker="o", ms=4)
            annotate(axes, name, (last.ops, seconds[-1]), ("data", "data"), (7, 0), colour, va="center")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.minorticks_off()
        axes.set_xlabel("ops, forward and backward", color=look.palette.muted)
        axes.set_ylabel("seconds", color=look.palette.muted)
    return figure


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
        write_whole(arguments.plot, png(draw_growth(rows)))
    if arguments.json:
        record.write(arguments.json, list(map(attrs.asdict, rows)), packages=["remat-solvers", "numba"])
    if rows[-1].wall_s > LIMIT_S:
        print(f"BROKEN: {rows[-1].ops} ops took {rows[-1].wall_s:.1f} s, and {LIMIT_S:.0f} s are promised")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
