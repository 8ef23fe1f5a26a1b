"""A time limit bounds planning as a whole, including errors: readings of the clock are counted."""

from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from remat_facade import NoRoom
from remat_facade.cli.app import main
from remat_facade.planning import planner as planning
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, Plan, noremat_peak_nbytes, save_graph
from remat_solvers import Deadline, InfeasibleBudget, min_budget
from remat_solvers.running.stopping import default_limit_s
from remat_solvers.switching import compiled
from remat_solvers.testing import chain

PARTS = 200  # of planning that may each find out for itself that time is up


@cache
def searched() -> tuple[Graph, int]:
    """A graph that takes a search, and its smallest budget."""
    graph = chain(12, skips=3)
    return graph, min_budget(graph).nbytes


@pytest.mark.parametrize("seconds", [0.001, 30.0])
def test_what_fits_is_looked_for_within_the_limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The search for the smallest budget gets the remaining time, and the error says so."""
    clock = count(0.0)

    def made(limit: float | None) -> Deadline:
        return Deadline(limit, clock=clock.__next__)

    monkeypatch.setattr("remat_facade.planning.planner.Deadline", made)
    graph, smallest = searched()
    planner = RecomputePlanner(budget=smallest - 1, method=Method(time_limit_s=seconds))
    with pytest.raises(InfeasibleBudget, match=r"time was up .*raise the time limit") as caught:
        planner(graph)
    assert next(clock) <= seconds + PARTS
    assert smallest <= caught.value.smallest_nbytes <= noremat_peak_nbytes(graph)
    assert "\n" not in str(caught.value)


def test_without_a_limit_the_smallest_budget_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the budget of `min_budget`."""
    monkeypatch.setattr("remat_facade.planning.planner.Deadline", lambda _: Deadline())
    graph, smallest = searched()
    planner = RecomputePlanner(budget=smallest - 1, method=Method(parameters={"moves": 1000}))
    with pytest.raises(InfeasibleBudget) as caught:
        planner(graph)
    assert smallest == caught.value.smallest_nbytes
    assert "time was up" not in str(caught.value)


def test_what_the_solver_found_on_its_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time to search, the named budget is below the unplanned peak, and works."""
    graph, smallest = searched()
    monkeypatch.setattr(
        "remat_facade.planning.planner.min_budget", lambda graph, _: min_budget(graph, Deadline(0.0))
    )
    planner = RecomputePlanner(budget=smallest - 1, method=Method(parameters={"moves": 1000}))
    with pytest.raises(InfeasibleBudget, match="time was up") as caught:
        planner(graph)
    told = caught.value.smallest_nbytes
    assert smallest <= told < noremat_peak_nbytes(graph)
    assert RecomputePlanner(budget=told, method=Method(parameters={"moves": 1000}))(graph).peak_nbytes <= told


def test_the_command_for_the_smallest_budget_takes_a_limit(tmp_path: Any, capsys: Any) -> None:
    """Without time the result is the unplanned peak, and a note says why."""
    graph, path = chain(24), tmp_path / "graph.json"
    save_graph(graph, path)
    assert main(["min-budget", str(path), "--time-limit", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert str(noremat_peak_nbytes(graph)) in out
    assert "time was up before smaller budgets were tried" in " ".join(out.split())


def test_an_error_of_plans_that_move_says_that_time_was_up() -> None:
    """The hint is part of the one line."""
    names = ("budget_nbytes", "host_budget_nbytes", "least_nbytes", "least_host_nbytes", "smallest_nbytes")
    figures = dict.fromkeys(names, 1)
    assert "time was up" not in str(NoRoom(**figures))
    text = str(NoRoom(**figures, cut_short=True))
    assert "raise the time limit, raise either budget" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("ops", "limit_s"), [(1, 20.0), (1_000, 20.0), (5_500, 40.0), (10_000, 60.0), (50_000, 60.0)]
)
def test_the_default_limit_grows_with_the_graph(ops: int, limit_s: float) -> None:
    """Linear between two sizes."""
    assert default_limit_s(ops) == limit_s


def test_the_default_limit_bounds_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of the user's, the deadline has the default; with one, it has that."""
    limits = []

    def made(limit: float | None) -> Deadline:
        limits.append(limit)
        return Deadline(limit)

    monkeypatch.setattr("remat_facade.planning.planner.Deadline", made)
    graph = chain(8)
    RecomputePlanner(budget="100%")(graph)
    RecomputePlanner(budget="100%", method=Method(time_limit_s=100.0))(graph)
    assert limits == [default_limit_s(len(graph.ops)), 100.0]


@pytest.mark.parametrize(
    ("budget", "limit_s", "called"), [("60%", None, True), ("60%", 5.0, True), ("100%", None, False)]
)
def test_loops_are_compiled_before_the_clock_starts(
    budget: str, limit_s: float | None, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a search runs, whatever its limit; a line says so where no earlier process has compiled them."""
    events: list[str] = []

    def made(limit: float | None) -> Deadline:
        events.append("clock")
        return Deadline(limit)

    monkeypatch.setattr(planning, "Deadline", made)
    monkeypatch.setattr(compiled, "compile_loops", lambda: events.append("compiled"))
    monkeypatch.setattr(compiled, "are_loops_compiled", lambda: False)
    lines: list[str] = []
    method = Method(time_limit_s=limit_s, parameters={"moves": 100})
    RecomputePlanner(budget=budget, method=method, on_progress=lines.append)(chain(24, skips=4))
    assert events[: 1 + called] == (["compiled", "clock"] if called else ["clock"])
    assert any("once for this installation" in line for line in lines) == called


@pytest.mark.parametrize(("limit_s", "given_s"), [(None, 7.0), (30.0, 7.0), (6.0, 5.0), (0.5, None)])
def test_raising_the_bound_is_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, given_s: float | None
) -> None:
    """It begins after a second; without a limit of the caller's, it has all of its seconds."""
    graph, smallest = searched()
    plan = RecomputePlanner(budget=2 * smallest, method=Method(parameters={"moves": 1000}))(graph)
    monkeypatch.setattr("remat_facade.planning.planner.time", SimpleNamespace(perf_counter=lambda: 11.0))
    given: list[float | None] = []

    def raised(graph: Graph, plan: Plan, deadline: Deadline) -> Plan:
        given.append(deadline.seconds)
        return plan

    monkeypatch.setattr(planning, "raised_bound", raised)
    planner = RecomputePlanner(budget=2 * smallest, method=Method(time_limit_s=limit_s, prove_s=7.0))
    assert planner.proven(graph, plan, 10.0) is plan
    assert given == ([] if given_s is None else [given_s])
