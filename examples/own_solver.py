"""A solver of your own, compared with others on the same step, without torch.

    python examples/own_solver.py tests/data/graphs/vgg16.json --budget 60%

The solver cuts the forward into segments and repeats each whole segment before its first use in the backward,
as Chen et al. 2016 do. Then it removes every repeat without which the step still fits, the longest first. The
referee judges every schedule, so a wrong solver gives no wrong plan. The entry point that registers it is in
`docs/solvers.md`; then `remat solve` and `limit_memory` find it by its name.
"""

import argparse
from math import isqrt
from typing import ClassVar

import attrs

from remat_graph import Graph, Schedule, format_nbytes, load_graph, resolve_budget, simulate
from remat_solvers import Deadline, Problem, Solution, get_solver, judge


@attrs.frozen
class Segments:
    """Repeat segments of the forward, then remove repeats that are not needed.

    For n operators it simulates O(n) orders for each of O(sqrt(n)) numbers of segments that fit.
    """

    name: ClassVar[str] = "segments"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """The fastest order that was found; the referee decides whether it fits."""
        graph, deadline = problem.graph, deadline or Deadline()
        found: list[list[int]] = []
        for count in range(1, 2 * isqrt(len(graph.ops))):
            if deadline.reached():
                break
            order = in_segments(graph, count)
            if peak_of(graph, order) <= problem.budget_nbytes:
                found.append(pruned(graph, order, problem.budget_nbytes, deadline))
        solutions = [judge(problem, order) for order in found]
        return min(solutions, key=lambda each: each.time_s or float("inf"), default=judge(problem, None))


def in_segments(graph: Graph, count: int) -> list[int]:
    """Every operator once, and each segment but the last again before its first use in the backward."""
    forward = [i for i, op in enumerate(graph.ops) if not op.backward]
    order = list(range(len(graph.ops)))
    length = -(-len(forward) // count)
    for start in range(0, len(forward) - length, length):
        again = [i for i in forward[start : start + length] if graph.ops[i].rerun is not None]
        made = {value for i in again for value in graph.ops[i].first.outputs}
        uses = (
            at for at, i in enumerate(order) if graph.ops[i].backward and made & {*graph.ops[i].first.inputs}
        )
        at = next(uses, None)
        if at is not None:
            order[at:at] = again
    return order


def pruned(graph: Graph, order: list[int], budget_nbytes: int, deadline: Deadline) -> list[int]:
    """The order without the repeats that the budget does not need, the longest first."""
    repeats = sorted(
        {i for i in order if order.count(i) > 1},
        key=lambda i: graph.ops[i].implementations[0].time_s,
        reverse=True,
    )
    for i in repeats:
        if deadline.reached():
            break
        at = len(order) - 1 - order[::-1].index(i)
        shorter = order[:at] + order[at + 1 :]
        if peak_of(graph, shorter) <= budget_nbytes:
            order = shorter
    return order


def peak_of(graph: Graph, order: list[int]) -> int:
    """The peak bytes of an order, by the referee."""
    return simulate(graph, Schedule.from_order(graph, order)).peak_nbytes


def main() -> None:
    """Print what each solver finds for a saved graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph", help="a file of `remat plan --graph-out`, or of the corpus")
    parser.add_argument("--budget", default="60%", help='bytes, "2GiB", or a share such as "60%%"')
    parser.add_argument("--seconds", type=float, default=5.0, help="most seconds of each solver")
    parser.add_argument(
        "--others", default="chen_sqrt,greedy,auto", help="registered solvers to compare with"
    )
    arguments = parser.parse_args()
    graph = load_graph(arguments.graph)
    problem = Problem(graph, resolve_budget(arguments.budget, graph))
    print(f"{graph.name}: {len(graph.ops)} ops, a budget of {format_nbytes(problem.budget_nbytes)}")
    for solver in (Segments(), *map(get_solver, arguments.others.split(","))):
        found = solver.solve(problem, Deadline(arguments.seconds))
        if found.overhead is None or found.peak_nbytes is None:
            print(f"{solver.name}: {found.status}")
        else:
            print(f"{solver.name}: {found.overhead:+.2%} at {format_nbytes(found.peak_nbytes)}")


if __name__ == "__main__":
    main()
