"""Searches of commands that keep what is known when Ctrl-C ends them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:  # an error of any command imports this module, and needs no numpy
    from remat_graph import Graph
    from remat_solvers import BudgetPoint


class EndedEarly(Exception):
    """Ctrl-C ended a search whose best result so far is shown; the message says what more time could give."""


@attrs.frozen(kw_only=True, eq=False)
class Sweep:
    """Curves by the names of methods, and per budget a bound on the overhead."""

    curves: "Mapping[str, Sequence[BudgetPoint]]"
    bounds: Sequence[float]
    ended_early: bool = False


def swept(
    variants: "Mapping[str, Graph]",
    solvers: Iterable[str],
    sizes: Sequence[int],
    seconds: float | None,
    update: Callable[[str], None],
) -> Sweep:
    """The curve of each solver on each variant of a graph; after Ctrl-C, the points until then.

    Args:
        variants: graphs, by what a solver's name is followed by; the first has all ways.
        solvers: names of methods.
        sizes: budgets in bytes.
        seconds: limit by the clock for one budget.
        update: called when a stage begins.

    Raises:
        KeyboardInterrupt: no point is known yet.
    """
    from remat_solvers import bounds_of, pareto

    curves: dict[str, list[BudgetPoint]] = {}
    whole = next(iter(variants.values()))
    try:
        for curve, name, graph in ((n + what, n, g) for n in solvers for what, g in variants.items()):
            update(f"{curve}: {len(sizes)} budgets of {graph.name}")
            points = curves.setdefault(curve, [])
            pareto(graph, sizes, solver=name, seconds=seconds, on_point=points.append)
        update("computing lower bounds")
        return Sweep(curves=curves, bounds=bounds_of(whole, sizes, seconds=seconds))
    except KeyboardInterrupt:
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            raise
        bounds = [point.solution.lower_bound_overhead for point in next(iter(curves.values()))]
        return Sweep(curves=curves, bounds=bounds, ended_early=True)
