"""Run one of this package's modules in its own process: JSON in, JSON out."""

import json
import subprocess
import sys
from typing import Any

from remat_solvers.protocol import Problem

NO_ORDER = "returned an invalid order of ops"

MOST_S = 86_400.0  # limit for every process, whatever its deadline

START_S = 30.0  # to start a process and to load compiled code, in addition to the solver's time


def run_json_module(module: str, request: object, seconds: float) -> tuple[Any, str]:
    """Send a JSON request to a module's stdin in its own process; it is ended after `seconds`, or a day.

    Returns:
        the last line of stdout, parsed, and what went wrong (then there is no reply); empty if nothing did.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", module],
            check=False,
            input=json.dumps(request),
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


def order_of_ops(reply: object, problem: Problem) -> tuple[int, ...] | None:
    """The reply as op indices; None if it is None.

    Raises:
        ValueError: it holds something else than op indices.
        TypeError: it is not a list.
    """
    if reply is None:
        return None
    if not isinstance(reply, list):
        raise TypeError(reply)
    for index in reply:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(problem.graph.ops):
            raise ValueError(index)
    return tuple(reply)
