"""Run a solver that may crash, hang or return nonsense in its own process, with an enforced deadline.

The problem is sent as JSON, an order of ops comes back, and the caller lets the referee judge it. A process
can be ended where a thread cannot, and it cannot corrupt this process's memory.
"""

import json
import sys

import attrs

from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_solvers.protocol import Deadline, Problem
from remat_solvers.running.subprocess_json import NO_ORDER, START_S, order_of_ops, run_json_module


@attrs.frozen
class SubprocessResult:
    """The result of a solver in its own process."""

    order: tuple[int, ...] | None  # op indices, or None
    problem: str = ""  # why there is no usable order; empty if there is one or the solver found none


def solve_in_subprocess(
    name: str, problem: Problem, seconds: float, *, most_s: float, deadline: Deadline
) -> SubprocessResult:
    """Let a registered solver work on a problem for this many seconds in its own process.

    A process that does not end is killed some time after that, after `most_s` seconds, or when `deadline` is
    stopped.
    """
    request = {
        "graph": graph_to_data(problem.graph),
        "budget_nbytes": problem.budget_nbytes,
        "solver": name,
        "seconds": seconds,
    }
    reply, failure = run_json_module(
        "remat_solvers.portfolio.isolated", request, min(seconds + START_S, most_s), deadline
    )
    if failure:
        return SubprocessResult(None, failure)
    try:
        return SubprocessResult(order_of_ops(reply["order"], problem))
    except (ValueError, KeyError, TypeError):
        return SubprocessResult(None, NO_ORDER)


def main() -> None:
    """Read a request from stdin and write the result as the last line of stdout."""
    from remat_solvers.registry import get_solver

    request = json.load(sys.stdin)
    graph = graph_from_data(request["graph"])
    solver = get_solver(request["solver"])
    solution = solver.solve(Problem(graph, request["budget_nbytes"]), Deadline(request["seconds"]))
    order = None if solution.order is None else [int(op) for op in solution.order]
    sys.stdout.write("\n" + json.dumps({"order": order}) + "\n")


if __name__ == "__main__":
    main()
