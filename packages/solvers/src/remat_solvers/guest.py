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

NO_ORDER = "returned what is no order of ops"
MOST_S = 86_400.0  # no process of ours is waited for any longer, whatever its deadline
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
    said, trouble = exchange("remat_solvers.guest", question, min(seconds + START_S, most_s))
    if trouble:
        return Answer(None, trouble)
    try:
        return Answer(order_of_ops(said["order"], problem))
    except (ValueError, KeyError, TypeError):
        return Answer(None, NO_ORDER)


def exchange(module: str, question: object, seconds: float) -> tuple[Any, str]:
    """Put a question to a module of ours in a process of its own, which is ended when time is up.

    Args:
        module: run as a program: JSON on stdin, JSON as the last line of stdout.
        question: what JSON can say.
        seconds: how long the process may take in all, a day at most; may be infinite.

    Returns:
        what the module said, and what went wrong (then there is nothing said); empty if nothing did.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", module],
            check=False,
            input=json.dumps(question),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=min(seconds, MOST_S),
        )
    except subprocess.TimeoutExpired:
        return None, f"did not end within {seconds:.0f} s and was ended"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return None, f"crashed: {last}"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    except (ValueError, IndexError):
        return None, NO_ORDER


def order_of_ops(said: object, problem: Problem) -> tuple[int, ...] | None:
    """What a process said is an order, if it is one.

    Raises:
        ValueError: it holds something else than op indices.
        TypeError: it is no list.
    """
    return None if said is None else tuple(_op(i, problem) for i in _listed(said))


def _listed(said: object) -> list[object]:
    if not isinstance(said, list):
        raise TypeError(said)
    return said


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
