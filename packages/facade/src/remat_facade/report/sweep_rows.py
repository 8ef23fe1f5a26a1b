"""Overhead against budget: a table, CSV and JSON, with one column per method and the lower bound."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_facade.report.table import Table
from remat_graph import Graph, format_nbytes, noremat_peak_nbytes
from remat_graph.switches.families import families_in, without_families
from remat_solvers import BudgetPoint

Curves = Mapping[str, Sequence[BudgetPoint]]  # by solver, with the families that it was not offered

EVERY = "all"
"""Stands for all families of a graph in an ablation."""


def ablations(graph: Graph, left_out: Iterable[str]) -> dict[str, Graph]:
    """The graph, and the graph without some families of ways, by what a method's name is followed by.

    Args:
        graph: the graph.
        left_out: families that are left out together, such as "masks,pools"; `EVERY` for all.

    Raises:
        UnknownFamily: the graph has no ways of such a family.
    """
    found = {"": graph}
    for text in left_out:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if names == (EVERY,):
            found[" (no ways)"] = without_families(graph, families_in(graph))
        else:
            found[f" (no {' or '.join(names)})"] = without_families(graph, names)
    return found


def sweep_table(graph: Graph, curves: Curves, bounds: Sequence[float]) -> Table:
    """One row per budget, one column per method; `bounds` has the lower bound of the overhead per budget.

    The first curve has all budgets; the others may have only the first ones.
    """
    some = next(iter(curves.values()))
    peak = noremat_peak_nbytes(graph)
    rows = []
    for i, point in enumerate(some):
        cells = [
            _percent(points[i].solution.overhead) if i < len(points) else "" for points in curves.values()
        ]
        share = f"{point.budget_nbytes / peak:.0%}" if peak else ""
        rows.append((format_nbytes(point.budget_nbytes), share, *cells, _percent(bounds[i])))
    return Table(
        title=f"{graph.name}: extra time by budget",
        columns=("budget", "of unplanned", *curves, "bound"),
        rows=tuple(rows),
        note="-: the method found no schedule; bound: no schedule has less extra time",
    )


def sweep_csv(curves: Curves, bounds: Sequence[float]) -> str:
    """One line per point of each curve."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["solver", "budget_nbytes", "overhead", "lower_bound_overhead", "peak_nbytes", "wall_s"])
    for solver, points in curves.items():
        for point, bound in zip(points, bounds, strict=False):
            found = point.solution
            row = (point.budget_nbytes, found.overhead, bound, found.peak_nbytes, f"{point.wall_s:.3f}")
            writer.writerow([solver, *row])
    return out.getvalue()


def sweep_facts(curves: Curves, bounds: Sequence[float]) -> dict[str, Any]:
    """The points of each curve and the bounds, for JSON."""
    return {
        "curves": {
            name: [
                {
                    "budget_nbytes": point.budget_nbytes,
                    "overhead": point.solution.overhead,
                    "peak_nbytes": point.solution.peak_nbytes,
                    "wall_s": point.wall_s,
                }
                for point in points
            ]
            for name, points in curves.items()
        },
        "lower_bound_overheads": list(bounds),
    }


def _percent(overhead: float | None) -> str:
    if overhead is None:
        return "-"
    return f"{100 * overhead:.2f} %" if math.isfinite(overhead) else "none exists"
