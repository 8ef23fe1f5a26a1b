"""Plan a graph with switches: decide them by bounds, and let a solver plan what is decided.

The candidates are all combinations of up to `MOST_COMBINED` switches; with more, only: all off, all on, one
family on, one family off. Each candidate is a graph without switches, and the cut bound on its time costs
little compared with a solve. Candidates are solved from the lowest bound up until no bound is below the best
time, so most are never solved. The bound of the whole is the least of the candidates' bounds, where these are
all combinations, and that of the relaxed graph otherwise.

Imperfect: with many switches, only whole families are decided.
"""

from functools import partial
from itertools import chain, combinations

import attrs

from remat_graph import Graph, Specialized, noremat_peak_nbytes, relaxed, specialize
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.specialize import family_of
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.reachability import reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.protocol import Deadline, Problem, Solution, Solver, Status

MOST_COMBINED = 3  # switches of which all combinations are tried
BOUND_SHARE = 0.1  # of the remaining time, for one bound


def combinations_of(graph: Graph) -> tuple[tuple[frozenset[str], ...], bool]:
    """The combinations of switches to try, and whether these are all; all off comes first."""
    switches, found = graph.switches, conflicts(graph)
    if len(switches) <= MOST_COMBINED:
        subsets = chain.from_iterable(combinations(switches, n) for n in range(len(switches) + 1))
        return tuple(frozenset(s) for s in subsets if compatible(found, s) == set(s)), True
    families = {name: [s for s in switches if family_of(s) == name] for name in map(family_of, switches)}
    tried = [(), switches, *families.values()]
    tried += [[s for s in switches if family_of(s) != name] for name in families]
    return tuple(dict.fromkeys(compatible(found, each) for each in tried)), False


def specializations(graph: Graph) -> tuple[Specialized, ...]:
    """The graphs to try, all off first."""
    return tuple(specialize(graph, on) for on in combinations_of(graph)[0])


def bounding_graphs(graph: Graph) -> tuple[Graph, ...]:
    """Graphs without switches of which at least one allows whatever a schedule of `graph` does."""
    tried, all_of_them = combinations_of(graph)
    return tuple(specialize(graph, on).graph for on in tried) if all_of_them else (relaxed(graph),)


def time_bound_s(graph: Graph, budget_nbytes: int, deadline: Deadline) -> float:
    """A lower bound on the compute seconds of a graph without switches; infinite if nothing fits."""
    reach = reachability(graph)
    if budget_nbytes < budget_floor(graph, reach).nbytes:
        return float("inf")
    if noremat_peak_nbytes(graph) <= budget_nbytes:
        return graph.time_s
    return graph.time_s + CutBound(graph, reach).extra_s(budget_nbytes, deadline.share(BOUND_SHARE))


def solve_switches(solver: Solver, problem: Problem, deadline: Deadline | None = None) -> Solution:
    """Solve a problem whose graph may have switches; without any, this is `solver.solve`."""
    graph = problem.graph
    if not graph.switches:
        return solver.solve(problem, deadline)
    deadline = deadline or Deadline()
    tried, all_of_them = combinations_of(graph)
    bound_s = partial(time_bound_s, budget_nbytes=problem.budget_nbytes, deadline=deadline)
    waiting = [specialize(graph, on) for on in tried]
    ranked = sorted((bound_s(made.graph), len(made.on), i) for i, made in enumerate(waiting))
    bounds: list[float] = []
    solved: list[tuple[Solution, Specialized]] = []
    best_s = float("inf")
    for place, (least_s, _, i) in enumerate(ranked):
        made = waiting[i]
        if least_s >= best_s and solved:
            bounds.append(least_s)
            continue
        # The most promising candidate gets the largest part of the time that is left.
        last = place + 1 == len(ranked) or ranked[place + 1][0] == float("inf")
        part = deadline.within(None) if last else deadline.share(0.6)
        part.on_progress = deadline.on_progress
        solution = solver.solve(attrs.evolve(problem, graph=made.graph), part)
        solved.append((solution, made))
        bounds.append(max(least_s, solution.lower_bound_s))
        best_s = min(best_s, float("inf") if solution.time_s is None else solution.time_s)
    lower_s = min(bounds) if all_of_them else bound_s(relaxed(graph))
    return _best(graph, solved, lower_s, all_of_them)


def _best(
    graph: Graph, solved: list[tuple[Solution, Specialized]], lower_s: float, all_of_them: bool
) -> Solution:
    """The fastest solution as one of the original graph."""
    found = [(solution, made) for solution, made in solved if solution.schedule is not None]
    if not found:
        solution = solved[0][0]
        impossible = all_of_them and all(each.status is Status.INFEASIBLE for each, _ in solved)
        peaks = [each.smallest_nbytes for each, _ in solved if each.smallest_nbytes is not None]
        return attrs.evolve(
            solution,
            status=Status.INFEASIBLE if impossible else Status.NOT_FOUND,
            lower_bound_s=lower_s,
            base_s=graph.time_s,
            smallest_nbytes=min(peaks, default=None),
        )
    solution, made = min(found, key=lambda pair: pair[0].time_s or 0.0)
    assert solution.schedule is not None
    assert solution.time_s is not None
    lower_s = min(lower_s, solution.time_s)
    proven = solution.status is Status.OPTIMAL and solution.time_s <= lower_s * (1 + 1e-12)
    return attrs.evolve(
        solution,
        schedule=made.restore(solution.schedule),
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        lower_bound_s=lower_s,
        base_s=graph.time_s,
        stats={**solution.stats, "switched": ", ".join(sorted(made.on))},
    )
