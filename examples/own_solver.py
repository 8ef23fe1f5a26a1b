"""A solver of your own, compared with others on the same step, without torch.

    python examples/own_solver.py tests/data/graphs/vgg16.json --budget 60%

The solver drops the results of forward operators at the boundary of forward and backward, the cheapest for
their bytes first, and recomputes each before its first use in the backward, until the step fits. The referee
judges every schedule, so a wrong solver gives no wrong plan. The entry point that registers it is in
`docs/solvers.md`; then `remat solve`, `limit_memory` and the portfolio find it by its name.
"""

import argparse
from typing import ClassVar

import attrs

from remat_graph import Graph, Schedule, format_nbytes, load_graph, resolve_budget, simulate
from remat_solvers import Deadline, Problem, Solution, get_solver, judge


@attrs.frozen
class CheapestFirst:
    """Recompute the cheapest forward operators, in order of seconds per byte.

    Each candidate costs one simulation, so n operators cost O(n^2) steps a pass. A repeat is placed before the
    first use in the backward only, so what it reads must be live there.
    """

    name: ClassVar[str] = "cheapest_first"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """The best order that was found; the referee decides whether it fits."""
        graph, deadline = problem.graph, deadline or Deadline()
        order = list(range(len(graph.ops)))
        peak_nbytes = peak_of(graph, order)
        improved = True
        while improved and peak_nbytes > problem.budget_nbytes:
            improved = False
            for op in candidates(graph):
                if peak_nbytes <= problem.budget_nbytes or deadline.reached():
                    break
                at = first_use_in_backward(graph, order, op)
                tried = [*order[:at], op, *order[at:]]
                nbytes = peak_of(graph, tried)
                if nbytes < peak_nbytes:
                    order, peak_nbytes, improved = tried, nbytes, True
        return judge(problem, order)


def candidates(graph: Graph) -> list[int]:
    """Forward operators that may run again, by the seconds that each of their bytes costs."""

    def price(op: int) -> float:
        run = graph.ops[op].implementations[graph.ops[op].rerun or 0]
        return run.time_s / max(1, sum(graph.values[value].nbytes for value in run.outputs))

    return sorted((i for i, op in enumerate(graph.ops) if not op.backward and op.rerun is not None), key=price)


def first_use_in_backward(graph: Graph, order: list[int], op: int) -> int:
    """Where in the order the backward first reads what an operator makes; the end if it never does."""
    made = set(graph.ops[op].first.outputs)
    uses = (at for at, i in enumerate(order) if graph.ops[i].backward and made & set(graph.ops[i].first.inputs))
    return next(uses, len(order))


def peak_of(graph: Graph, order: list[int]) -> int:
    """The peak bytes of an order, by the referee."""
    return simulate(graph, Schedule.from_order(graph, order)).peak_nbytes


def main() -> None:
    """Print what each solver finds for a saved graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph", help="a file of `remat plan --graph-out`, or of the corpus")
    parser.add_argument("--budget", default="60%", help='bytes, "2GiB", or a share such as "60%%"')
    parser.add_argument("--seconds", type=float, default=5.0, help="most seconds of each solver")
    parser.add_argument("--others", default="chen_sqrt,greedy,auto", help="registered solvers to compare with")
    arguments = parser.parse_args()
    graph = load_graph(arguments.graph)
    problem = Problem(graph, resolve_budget(arguments.budget, graph))
    print(f"{graph.name}: {len(graph.ops)} ops, a budget of {format_nbytes(problem.budget_nbytes)}")
    for solver in (CheapestFirst(), *map(get_solver, arguments.others.split(","))):
        found = solver.solve(problem, Deadline(arguments.seconds))
        if found.overhead is None or found.peak_nbytes is None:
            print(f"{solver.name}: {found.status}")
        else:
            print(f"{solver.name}: {found.overhead:+.2%} at {format_nbytes(found.peak_nbytes)}")


if __name__ == "__main__":
    main()
