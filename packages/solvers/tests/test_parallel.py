"""Parts of a search run side by side, and their results do not depend on who is first."""

import os
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

import remat_solvers
from remat_graph import noremat_peak_nbytes
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Deadline, Problem, Progress, get_solver, min_budget, solve_switches
from remat_solvers.local_search import joint, min_peak
from remat_solvers.portfolio import auto, walks
from remat_solvers.running.parallel import LANES, batches, in_parallel
from remat_solvers.switching import solving
from remat_solvers.testing import mobile, random_graph, transformer, unet

LONG_S = 60.0


def test_results_come_in_the_order_of_the_tasks() -> None:
    """Whichever ends first, and the first task runs in the caller's thread."""

    def task(number: int, seconds: float, deadline: Deadline) -> tuple[int, bool]:
        time.sleep(seconds)
        return number, threading.current_thread() is threading.main_thread()

    tasks = [partial(task, 0, 0.05), partial(task, 1, 0.0), partial(task, 2, 0.01)]
    assert [(0, True), (1, False), (2, False)] == in_parallel(tasks, Deadline())
    assert [] == in_parallel([], Deadline())
    assert [(0, True)] == in_parallel(tasks[:1], Deadline())


def test_only_the_first_task_reports() -> None:
    """Callers' functions run in the caller's thread alone."""
    called: list[str] = []

    def task(deadline: Deadline) -> None:
        deadline.report("part", None, 0.0)
        deadline.reached()

    def noted(what: str, *_: Progress) -> None:
        called.append(what)
        assert threading.current_thread() is threading.main_thread()

    deadline = Deadline(LONG_S, partial(noted, "progress"), on_check=partial(noted, "check"))
    in_parallel([task, task, task], deadline)
    assert ["check", "progress"] == sorted(called)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_time_of_the_others(error: type[BaseException]) -> None:
    """And is the caller's; the others end at their next check."""
    ended = threading.Event()

    def fails(deadline: Deadline) -> None:
        raise error

    def waits(deadline: Deadline) -> None:
        while not deadline.reached():
            time.sleep(0.001)
        ended.set()

    deadline = Deadline(LONG_S)
    with pytest.raises(error):
        in_parallel([fails, waits], deadline)
    assert ended.is_set()
    assert not deadline.stopped
    with pytest.raises(ValueError, match="of the second"):
        in_parallel([lambda _: None, partial(_fail, "of the second")], deadline)


def _fail(text: str, deadline: Deadline) -> None:
    raise ValueError(text)


def test_a_deadline_that_ends_a_thread_is_noted() -> None:
    """`hit` says whether a result depends on the clock."""
    deadline = Deadline(LONG_S)
    deadline.stop()
    in_parallel([lambda _: None, lambda part: part.reached()], deadline)
    assert deadline.hit


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_forked_meanwhile_does_all_of_the_work() -> None:
    """It waits for no thread of its parent."""

    def forks(deadline: Deadline) -> int:
        return os.fork()

    def waits(deadline: Deadline) -> int:
        time.sleep(0.05)
        return os.getpid()

    pid, worked = in_parallel([forks, waits], Deadline())
    if pid == 0:
        os._exit(0 if worked == os.getpid() else 1)
    assert worked == os.getpid()
    _, status = os.waitpid(pid, 0)
    assert status == 0


def test_batches() -> None:
    """As many as lanes, and the rest."""
    assert [[0, 1], [2, 3], [4]] == list(batches(range(5), 2))
    assert [list(range(LANES))] == list(batches(range(LANES)))
    assert [] == list(batches([]))


def test_results_do_not_depend_on_which_thread_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan when the parts run one after the other, from the last."""
    graphs = [transformer(3), mobile(6)]
    graphs += [
        with_random_switches(random_graph(seed, ops), seed, most=8) for seed, ops in ((4, 28), (2, 20))
    ]
    problems = [Problem(graph, int(0.5 * noremat_peak_nbytes(graph))) for graph in graphs]
    problems.append(Problem(unet(4), min_budget(unet(4)).nbytes))
    solve = partial(solve_switches, get_solver("auto", moves=60_000))
    side_by_side = [solve(problem) for problem in problems]
    assert any(int(each.stats["moves"]) > 0 for each in side_by_side)

    turned: set[str] = set()

    def reversed_turns(name: str, tasks: list, deadline: Deadline) -> list:  # type: ignore[type-arg]
        if len(tasks) > 1:
            turned.add(name)
        return [task(deadline) for task in reversed(tasks)][::-1]

    modules = (auto, walks, joint, min_peak, solving)
    for module in modules:
        monkeypatch.setattr(module, "in_parallel", partial(reversed_turns, module.__name__))
    for problem, before in zip(problems, side_by_side, strict=True):
        after = solve(problem)
        assert (before.time_s, before.lower_bound_s) == (after.time_s, after.lower_bound_s)
        assert before.stats == after.stats
    assert {module.__name__ for module in modules} == turned


@pytest.mark.parametrize("moves", [2_000, 60_000])
def test_moves_bound_the_search(moves: int) -> None:
    """Those of the first walks included; twice as many where a wide gap is left, but for the last walks."""
    for graph in (mobile(6), transformer(3)):
        problem = Problem(graph, int(0.5 * noremat_peak_nbytes(graph)))
        tried = int(get_solver("auto", moves=moves).solve(problem).stats["moves"])
        assert 0 < tried <= 2 * moves + LANES * min(moves, walks.WALK_MOVES)


def test_a_caller_is_asked_while_it_waits_for_others() -> None:
    """Ctrl-C and the line of progress do not wait until the longest part has ended."""
    asked: list[None] = []
    enough = threading.Event()

    def ask() -> None:
        asked.append(None)
        if len(asked) == 3:
            enough.set()

    ended = in_parallel([lambda _: True, lambda _: enough.wait(LONG_S)], Deadline(LONG_S, on_check=ask))
    assert [True, True] == ended


def test_compiled_loops_let_other_threads_run() -> None:
    """Every function that Python calls; otherwise side by side is one after the other."""
    folder = Path(remat_solvers.__file__).parent / "kernels"
    found = 0
    for file in folder.glob("*.py"):
        if file.stem == "jit":
            continue
        for each in vars(import_module(f"remat_solvers.kernels.{file.stem}")).values():
            if hasattr(each, "targetoptions"):
                found += 1
                assert each.targetoptions["nogil"]
    assert found > 20
