"""Run one of this package's modules in its own process: JSON in, JSON out."""

import json
import subprocess
import sys
from typing import Any

from remat_solvers.protocol import Deadline, Problem

NO_ORDER = "returned an invalid order of ops"

MOST_S = 86_400.0  # limit for every process, whatever its deadline

CHECK_S = 0.1  # between two checks whether the deadline is stopped

START_S = 30.0  # to start a process and to load compiled code, in addition to the solver's time


def run_json_module(module: str, request: object, seconds: float, deadline: Deadline) -> tuple[Any, str]:
    """Send a JSON request to a module's stdin in its own process.

    The process is ended after `seconds` or a day, when `deadline` is stopped, and by any exception here.

    Returns:
        the last line of stdout, parsed, and what went wrong (then there is no reply); empty if nothing did.
    """
    until = Deadline(min(seconds, MOST_S))
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            done = _output(process, json.dumps(request), until, deadline)
        finally:
            process.kill()  # does nothing to a process that has ended
    if deadline.stopped:
        return None, "was interrupted"
    if done is None:
        return None, f"did not end within {seconds:.0f} s and was ended"
    stdout, stderr = done
    if process.returncode != 0:
        last = (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return None, f"crashed: {last}"
    try:
        return json.loads(stdout.strip().splitlines()[-1]), ""
    except (ValueError, IndexError):
        return None, NO_ORDER


def _output(
    process: "subprocess.Popen[str]", request: str | None, until: Deadline, deadline: Deadline
) -> tuple[str, str] | None:
    """What the process has written to stdout and stderr when it ends; None if it does not end in time."""
    while not deadline.stopped and (left_s := until.remaining_s) > 0:
        try:
            return process.communicate(request, timeout=min(left_s, CHECK_S))
        except subprocess.TimeoutExpired:
            request = None  # the next call sends the remainder of it
    return None


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
