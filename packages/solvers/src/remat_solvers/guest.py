"""Running a solver that may crash, hang or lie: in a process of its own, with a deadline that is kept.

The problem goes over as JSON, an order of ops comes back, and the caller lets the referee judge it. A process
can be ended where a thread could not; nothing it does to its own memory reaches ours.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from remat_graph.serialize import graph_from_data, graph_to_data
from remat_solvers.protocol import Deadline, Problem

START_S = 30.0  # for a process to start and to load its compiled code, beyond the solver's own time


@attrs.frozen
class Answer:
    """What a guest said.

    Attributes:
        order: op indices, or None.
        problem: why there is no order worth judging; empty if there is one or the solver found none.
    """

    order: tuple[int, ...] | None
    problem: str = ""


def ask(
    name: str,
    problem: Problem,
    seconds: float,
    parameters: Mapping[str, Any] | None = None,
    *,
    most_s: float = float("inf"),
) -> Answer:
    """Let a registered solver work on a problem in its own process.

    Args:
        name: as registered.
        problem: graph and budget.
        seconds: its deadline; ended some time after it.
        parameters: of the solver, as JSON can say them.
        most_s: ended after this in any case.
    """
    question = {
        "graph": graph_to_data(problem.graph),
        "budget_nbytes": problem.budget_nbytes,
        "solver": name,
        "seconds": seconds,
        "parameters": dict(parameters or {}),
    }
    command = [sys.executable, "-m", "remat_solvers.guest"]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            check=False,
            input=json.dumps(question),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=min(seconds + START_S, most_s),
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"did not end within {min(seconds + START_S, most_s):.0f} s and was ended")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Answer(None, f"crashed: {last}")
    try:
        order = json.loads(done.stdout.strip().splitlines()[-1])["order"]
        return Answer(None if order is None else tuple(_op(i, problem) for i in order))
    except (ValueError, KeyError, IndexError, TypeError):
        return Answer(None, "returned what is no order of ops")


def _op(index: object, problem: Problem) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(problem.graph.ops):
        raise ValueError(index)
    return index


def main() -> None:
    """The process: a question on stdin, an answer as the last line of stdout."""
    from remat_solvers.registry import get_solver

    question = json.load(sys.stdin)
    graph = graph_from_data(question["graph"])
    solver = get_solver(question["solver"], **question["parameters"])
    solution = solver.solve(Problem(graph, question["budget_nbytes"]), Deadline(question["seconds"]))
    order = None if solution.order is None else [int(op) for op in solution.order]
    sys.stdout.write("\n" + json.dumps({"order": order}) + "\n")


if __name__ == "__main__":
    main()
