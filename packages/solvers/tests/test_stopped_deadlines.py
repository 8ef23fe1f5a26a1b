"""A deadline that is stopped ends a solve with the best schedule so far, and the processes of solvers."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from remat_graph import noremat_peak_nbytes
from remat_solvers import Deadline, Problem, Solution, get_solver, solve_present, solve_switches
from remat_solvers.running.subprocess_json import run_json_module
from remat_solvers.testing import chain

PARTS = 200  # of a solver that may each find out for itself that time is up
# Each asks the deadline itself; those that state their program in cvxpy end when its time limit does.
SOLVERS = ("auto", "search", "greedy", "interval_dp", "mincut", "twremat", "chen_greedy", "griewank", "rotor")
ANYTIME = ("auto", "search")  # have a schedule long before they end


def stopped_at(check: int) -> tuple[Deadline, list[int]]:
    """A deadline without a limit that is stopped at a check, and the checks so far."""
    checks = [0]

    def count() -> None:
        checks[0] += 1
        if checks[0] == check:
            deadline.stop()

    deadline = Deadline(on_check=count)
    return deadline, checks


def test_parts_are_stopped_with_the_whole() -> None:
    """Also those without a limit, and those that begin later; a part does not stop the whole."""
    whole = Deadline()
    part = whole.share(0.5)
    other = part.within(100.0)
    other.stop()
    assert [other.reached(), part.reached(), whole.reached()] == [True, False, False]
    whole.stop()
    assert part.reached()
    assert whole.within(None).reached()
    assert (part.remaining_s, whole.hit) == (0.0, True)


@pytest.mark.parametrize("solve", [solve_switches, solve_present])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_ends_with_what_it_has(name: str, solve: Callable[..., Solution]) -> None:
    """Soon after any of its checks; the referee has judged what it returns."""
    graph = chain(24, skips=4)
    problem = Problem(graph, int(0.6 * noremat_peak_nbytes(graph)))
    checks, at, found = [0], 1, 0
    while at <= checks[0] + 1:  # until it ends before it is stopped
        deadline, checks = stopped_at(at)
        solution = solve(get_solver(name), problem, deadline)
        assert checks[0] <= at + PARTS
        assert solution.peak_nbytes is None or solution.peak_nbytes <= problem.budget_nbytes
        if not deadline.stopped:
            break
        assert deadline.hit
        found += solution.feasible
        at = 2 * at + 1
    assert found or name not in ANYTIME


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that a test starts."""
    found: list[Any] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return found


def test_a_process_ends_when_its_deadline_is_stopped(started: list[Any], monkeypatch: Any) -> None:
    """It reads no request and would run for ever; the caller learns why there is no reply."""
    deadline = Deadline()

    def wait(process: Any, *_: Any, **__: Any) -> Any:
        deadline.stop()
        raise subprocess.TimeoutExpired("", 0.0)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait)
    reply = run_json_module("http.server", {}, 1e9, deadline)
    assert reply == (None, "was interrupted")
    assert [process.poll() is not None for process in started] == [True]


def test_a_process_ends_with_an_exception(started: list[Any], monkeypatch: Any) -> None:
    """A second Ctrl-C, for example."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_json_module("http.server", {}, 1e9, Deadline())
    assert [process.poll() is not None for process in started] == [True]
