"""Ctrl-C ends planning with the best plan so far; without one, everything is as before."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from remat_facade import PlanningInterrupted
from remat_facade.cli.app import main
from remat_facade.cli.batch_search import BatchClock, largest
from remat_facade.planning import planner as planning
from remat_facade.planning.known_plans import SAVING_S, SEARCHED_S, carried
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.zoo import Zoo
from remat_graph import Graph, load_graph, load_plan, noremat_peak_nbytes
from remat_graph.testing.resized import resized
from remat_solvers import Deadline, InfeasibleBudget, MaxBatch, max_batch, pareto, queries
from remat_solvers.running.stopping import interrupted
from remat_solvers.testing import chain, unet

from .corpus import GRAPHS

Check = Callable[[], None]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own handler is installed before and after each test."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert found is signal.default_int_handler


@pytest.fixture
def at_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Check], None]:
    """Let a function run whenever a solver asks whether time is up; there is no limit by the clock."""

    def install(check: Check) -> None:
        monkeypatch.setattr(planning, "Deadline", lambda _: Deadline(on_check=check))

    return install


class CtrlC:
    """Sends the signal at some checks, counted from 1."""

    def __init__(self, *checks: int) -> None:
        self.at, self.seen = checks, 0

    def __call__(self) -> None:
        self.seen += 1
        if self.seen in self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def graph() -> Graph:
    """A step with something to recompute."""
    return chain(24, skips=4)


@pytest.mark.parametrize("check", [30, 100])
def test_the_best_plan_so_far(graph: Graph, tmp_path: Path, at_checks: Any, check: int) -> None:
    """Within the budget; one line has its numbers; the search ends, and nothing is saved or carried."""
    ctrl_c = CtrlC(check)
    at_checks(ctrl_c)
    zoo = Zoo(folder=tmp_path / "plans", times="test")
    planner = RecomputePlanner(budget="60%", zoo=zoo)
    with pytest.warns(PlanningInterrupted) as caught:
        plan = planner(graph)
    assert interrupted(plan)
    assert plan.deadline_hit
    assert plan.peak_nbytes <= plan.budget_nbytes
    line = str(caught[0].message)
    assert "\n" not in line
    for number in (plan.overhead, plan.lower_bound_overhead, plan.gap):
        assert f"{number:.2%}" in line
    assert "cut short by Ctrl-C" in plan.summary()
    assert ctrl_c.seen < check + 50
    assert not planner.known.plans
    assert not zoo.folder.exists()


def test_without_a_plan_it_is_raised(graph: Graph, tmp_path: Path, at_checks: Any) -> None:
    """At the first check nothing is known; the same planner plans as before afterwards."""
    at_checks(CtrlC(1))
    planner = RecomputePlanner(budget="60%", zoo=Zoo(folder=tmp_path / "plans", times="test"))
    with pytest.raises(KeyboardInterrupt):
        planner(graph)
    assert not list(tmp_path.iterdir())
    at_checks(lambda: None)
    plan = planner(graph)
    assert not interrupted(plan)
    assert plan.schedule == RecomputePlanner(budget="60%")(graph).schedule


def test_a_second_one_is_raised(graph: Graph, at_checks: Any) -> None:
    """Also while the solver ends because of the first."""
    at_checks(CtrlC(30, 31))
    with pytest.raises(KeyboardInterrupt):
        RecomputePlanner(budget="60%")(graph)


@pytest.mark.parametrize("check", [1, 30])
def test_where_nothing_fits_it_is_no_error_of_the_budget(
    graph: Graph, tmp_path: Path, at_checks: Any, check: int
) -> None:
    """Nor is the smallest budget saved that was known when the search for it was interrupted."""
    at_checks(CtrlC(check))
    planner = RecomputePlanner(budget="1%", zoo=Zoo(folder=tmp_path / "plans", times="test"))
    with pytest.raises((KeyboardInterrupt, InfeasibleBudget)) as caught:
        planner(graph)
    assert caught.type is KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_carried_plan_counts(monkeypatch: pytest.MonkeyPatch, at_checks: Any) -> None:
    """However far from its bound it is: it is the best so far."""
    planner = RecomputePlanner(budget="60%")
    planner(unet(4))
    monkeypatch.setattr(planning, "FAR", -1.0)
    at_checks(CtrlC(20))
    with pytest.warns(PlanningInterrupted):
        plan = planner(resized(unet(4), 0))
    assert carried(plan)
    assert plan.peak_nbytes <= plan.budget_nbytes


def test_a_revision_says_so_too(at_checks: Any) -> None:
    """The plan found until then is used if it is faster, and not known to other sizes."""
    planner = RecomputePlanner(budget="60%")
    slow = planner(unet(4))
    stats = {"method": "carried", SAVING_S: 1.0, SEARCHED_S: 1.0}
    slow = attrs.evolve(slow, time_s=10 * slow.time_s, solver_stats=stats)
    known = sum(map(len, planner.known.plans.values()))
    at_checks(CtrlC(30))
    with pytest.warns(PlanningInterrupted):
        found = planner.revised(unet(4), slow)
    assert found is not None
    assert interrupted(found)
    assert known == sum(map(len, planner.known.plans.values()))


def test_a_handler_of_the_program_stays(graph: Graph, at_checks: Any) -> None:
    """It is called each time, and planning goes on unless it raises."""
    received: list[int] = []

    def own(number: int, _: Any) -> None:
        received.append(number)
        if len(received) == 3:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, own)
    try:
        at_checks(CtrlC(30, 31))
        assert not interrupted(RecomputePlanner(budget="60%")(graph))
        assert len(received) == 2
        at_checks(CtrlC(30))
        with pytest.raises(KeyboardInterrupt):
            RecomputePlanner(budget="60%")(graph)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_has_no_handler(graph: Graph, at_checks: Any) -> None:
    """Planning in the background leaves the main thread's handler alone."""
    handlers: set[Any] = set()
    at_checks(lambda: handlers.add(signal.getsignal(signal.SIGINT)))
    plans: list[Any] = []
    thread = threading.Thread(target=lambda: plans.append(RecomputePlanner(budget="60%")(graph)))
    thread.start()
    thread.join()
    assert handlers == {signal.default_int_handler}
    assert not interrupted(plans[0])


def test_the_line_has_overhead_bound_and_seconds(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is rewritten is called each second too; another callback with each improvement only."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    lines: dict[bool, list[str]] = {}
    for live in (False, True):
        now[0] = 0.0
        monkeypatch.setattr(planning, "Deadline", lambda limit: Deadline(None, clock=clock))
        shown = lines[live] = []
        RecomputePlanner(budget="60%", live=live, on_progress=shown.append)(graph)
    improved, rewritten = lines[False], lines[True]
    assert improved[0].startswith("planning chain")
    first = next(line for line in improved if "overhead +" in line)
    assert first.startswith("planning by greedy: overhead +")
    assert "%, bound +" in first
    assert improved[-1].startswith("planned chain")
    assert "searched for in" in improved[-1]
    assert len(set(improved)) == len(improved) < len(rewritten)
    seconds = [int(line.rpartition(", ")[2].removesuffix(" s")) for line in rewritten[1:-1]]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) > 2


INTERRUPTED_COMMAND = """
import signal, sys
from remat_facade.cli.app import main
from remat_solvers import Deadline

checks, reached = 0, Deadline.reached

def counted(deadline):
    global checks
    checks += 1
    if checks == int(sys.argv[1]):
        signal.raise_signal(signal.SIGINT)
    return reached(deadline)

Deadline.reached = counted
sys.exit(main([*sys.argv[2:], "--time-limit", "1e6"]))
"""


def command(check: int, *words: str) -> Any:
    """Run `remat` in a process that gets Ctrl-C at a check."""
    program = [sys.executable, "-c", INTERRUPTED_COMMAND, str(check), *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_writes_the_best_plan(tmp_path: Path) -> None:
    """Exit code 130 and one line on stderr; nothing of progress anywhere, since there is no terminal."""
    graph, path = GRAPHS / "unet.json", tmp_path / "plan.json"
    done = command(40, "solve", str(graph), "--budget", "60%", "--plan-out", str(path))
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)
    assert "planning was interrupted: the best plan so far has an overhead of" in done.stderr
    assert "wrote" in done.stdout
    assert "planning by" not in done.stdout
    assert interrupted(load_plan(path))


def test_the_command_without_a_plan(tmp_path: Path) -> None:
    """The file of an earlier run is unchanged."""
    path = tmp_path / "plan.json"
    path.write_text("mine")
    done = command(1, "solve", str(GRAPHS / "unet.json"), "--budget", "40%", "--plan-out", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (130, "", 1)
    assert "interrupted; files of earlier runs are unchanged" in done.stderr
    assert [path.read_text(), list(tmp_path.iterdir())] == ["mine", [path]]


def test_the_command_shows_the_smallest_budget_so_far() -> None:
    """With a line that a smaller one may work."""
    done = command(10, "min-budget", str(GRAPHS / "unet.json"))
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)
    assert "interrupted: a smaller budget may work too" in done.stderr
    assert "smallest budget with a schedule" in done.stdout


@pytest.mark.parametrize("known", [0, 2])
def test_a_sweep_writes_the_budgets_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, known: int
) -> None:
    """Of the first curve and of the others; without any, the file of an earlier run is unchanged."""
    csv = tmp_path / "sweep.csv"
    csv.write_text("mine")
    graph = load_graph(GRAPHS / "unet.json")

    def some(_: Graph, budgets: Any, *, on_point: Callable[[Any], None], solver: str, **__: Any) -> None:
        most = known if solver == "greedy" else 1
        pareto(graph, budgets[:most], solver=solver, on_point=on_point)
        if most < 2 or not known:
            raise KeyboardInterrupt

    monkeypatch.setattr(queries, "pareto", some)
    words = [
        "sweep",
        str(GRAPHS / "unet.json"),
        "--solvers",
        "greedy,chen_greedy",
        "--budgets",
        "50%,70%,90%",
    ]
    assert main([*words, "--csv", str(csv), "--png", str(tmp_path / "sweep.png")]) == 130
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    if known:
        assert "interrupted: these are the plans until then" in shown.err
        solvers = [line.partition(",")[0] for line in csv.read_text().splitlines()]
        assert solvers == ["solver", "greedy", "greedy", "chen_greedy"]
    else:
        assert (csv.read_text(), shown.out) == ("mine", "")


def test_the_largest_batch_so_far() -> None:
    """With whether the search ended early; without any, the interrupt goes on."""

    def search(*, solver: str, on_fit: Callable[[MaxBatch], None], batches: int) -> MaxBatch:
        for batch in range(1, batches + 1):
            on_fit(MaxBatch(batch=batch, solution=None, refused=None))
        raise KeyboardInterrupt

    made = largest(partial(search, batches=3), ["auto"], BatchClock(60.0))
    assert made.interrupted
    assert {name: each.batch for name, each in made.found.items()} == {"auto": 3}
    with pytest.raises(KeyboardInterrupt):
        largest(partial(search, batches=0), ["auto"], BatchClock(60.0))


def test_each_batch_that_fits_is_reported() -> None:
    """In increasing order; the last is the result."""
    fits: list[MaxBatch] = []
    peak = noremat_peak_nbytes(chain(8))
    found = max_batch(
        lambda batch: chain(8 * batch),
        3 * peak,
        max_overhead=0.1,
        most=4,
        solver="greedy",
        on_fit=fits.append,
    )
    assert [each.batch for each in fits] == sorted(each.batch for each in fits)
    assert fits[-1].batch == found.batch > 1
