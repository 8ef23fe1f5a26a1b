"""`moccasin` in CP-SAT: the program's optimum, and a process that may hang or die."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest

from remat_graph import Graph, noremat_peak_nbytes
from remat_solvers import BadParameter, Deadline, Problem, Solution, SolverWarning, get_solver
from remat_solvers.testing import layer_graph, random_graph

from . import oracle, stage_oracle
from .corpus import ORACLES

HangLimit = Callable[[int], AbstractContextManager[None]]

HAVE = find_spec("ortools") is not None
needs_ortools = pytest.mark.skipif(not HAVE, reason="the extra cpsat is not installed")


def layers(name: str) -> Graph:
    return layer_graph(json.loads((ORACLES / f"{name}.json").read_text()))


def moccasin(
    graph: Graph,
    budget: int,
    backend: str = "CP-SAT",
    *,
    computations: int = 2,
    deadline: Deadline | None = None,
) -> Solution:
    solver = get_solver("moccasin", backend=backend, computations=computations)
    return solver.solve(Problem(graph, budget), deadline)


@needs_ortools
@pytest.mark.parametrize(
    ("name", "budget", "computations", "optimum"),
    [
        # The oracles of test_stages: from 5 units on a second run is enough, 4 need a third and a fourth.
        *(("linear8_unit", budget, 2, best) for budget, best in {5: 22, 6: 21, 7: 20, 8: 19, 9: 18}.items()),
        ("linear8_unit", 4, 2, None),
        ("linear8_unit", 4, 9, 26),
        ("linear16_unit", 8, 2, 43),
        ("VGG16_flops_b1", 51_380_224, 2, 46_497_497_088),
    ],
)
def test_the_published_optima(name: str, budget: int, computations: int, optimum: int | None) -> None:
    """Proven, and C is what binds."""
    solution = moccasin(layers(name), budget, computations=computations)
    assert solution.time_s == optimum
    assert solution.stats["proven"] is True
    if solution.order is not None:
        assert max(map(solution.order.count, solution.order)) <= computations
        assert solution.peak_nbytes is not None
        assert solution.peak_nbytes <= budget


@needs_ortools
@pytest.mark.parametrize("seed", range(6))
def test_it_equals_the_program_and_brute_force(seed: int) -> None:
    """The integer program's for each C, brute force over stages with C large, and never below any order's."""
    graph = random_graph(seed, ops=4 + seed % 4, fancy=False)
    for fraction in (0.75, 0.9):
        budget = int(fraction * noremat_peak_nbytes(graph))
        for computations in (2, 3):
            expected = moccasin(graph, budget, "HIGHS", computations=computations).time_s
            found = moccasin(graph, budget, computations=computations).time_s
            assert (expected is None) == (found is None)
            if found is not None:
                assert expected == pytest.approx(found)
                assert oracle.fastest_s(graph, budget) <= found + 1e-9
        every = moccasin(graph, budget, computations=len(graph.ops)).time_s
        least = stage_oracle.fastest_s(graph, budget)
        assert least == (pytest.approx(every) if every is not None else float("inf"))


@needs_ortools
@pytest.mark.parametrize("seed", range(4))
def test_it_equals_the_program_on_graphs_of_every_kind(seed: int) -> None:
    """Several outputs an op, values that stay, tangents, scratch, generator states."""
    graph = random_graph(seed, ops=7)
    budget = int(0.85 * noremat_peak_nbytes(graph))
    expected, found = (moccasin(graph, budget, backend).time_s for backend in ("HIGHS", "CP-SAT"))
    assert (expected is None) == (found is None)
    assert found is None or expected == pytest.approx(found)


@needs_ortools
def test_the_same_order_every_time() -> None:
    """One worker, one seed."""
    graph = layers("linear16_unit")
    first, second = (moccasin(graph, 10).order for _ in range(2))
    assert first is not None
    assert first == second


@needs_ortools
def test_sizes_beyond_64_bits_of_products() -> None:
    """Petabytes: rounded against us by less than a billionth, so not called proven, but within the budget."""
    graph = layers("linear8_unit")
    half = 5 * 10**14
    values = [attrs.evolve(v, nbytes=v.nbytes * half + place) for place, v in enumerate(graph.values)]
    solution = moccasin(attrs.evolve(graph, values=values), 6 * half + 10**9)
    assert solution.time_s == 21
    assert solution.stats["proven"] is False


@needs_ortools
def test_a_deadline_is_kept(hang_limit: HangLimit) -> None:
    """Too large for two seconds: the best so far or nothing, and the deadline is reported as hit."""
    graph = random_graph(3, ops=150, fancy=False)
    deadline = Deadline(2.0)
    with hang_limit(10):
        solution = moccasin(graph, int(0.6 * noremat_peak_nbytes(graph)), computations=4, deadline=deadline)
    assert solution.stats["proven"] is False
    assert deadline.hit


def test_without_ortools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(BadParameter, match=r"needs ortools.*pip install 'remat-solvers\[cpsat\]'") as caught:
        moccasin(layers("linear4_unit"), 4)
    assert "\n" not in str(caught.value)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ortools of our own making; returns the module in which the process ends as the test wants."""
    module = tmp_path / "ortools" / "sat" / "python" / "cp_model.py"
    module.parent.mkdir(parents=True)
    for folder in (tmp_path / "ortools", tmp_path / "ortools" / "sat", module.parent):
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return module


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed: exit code -9"),
        ("raise MemoryError('no bytes left')", "crashed: MemoryError: no bytes left"),
        ("import os; os._exit(0)", "returned an invalid order of ops"),
    ],
    ids=["killed", "out of memory", "silent"],
)
def test_a_process_that_dies_is_a_warning(fake: Path, outcome: str, said: str) -> None:
    """The caller lives on, without a schedule and without a claim."""
    fake.write_text(outcome)
    with pytest.warns(SolverWarning, match=f"CP-SAT {said}"):
        solution = moccasin(layers("linear4_unit"), 4)
    assert solution.order is None
    assert solution.stats == {"proven": False}


def test_a_process_that_hangs_is_ended(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_limit: HangLimit
) -> None:
    """Soon after the deadline, and it is gone."""
    monkeypatch.setattr("remat_solvers.mip.cp_sat.GRACE_S", 0.5)
    number = tmp_path / "pid"
    write = f"pathlib.Path({str(number)!r}).write_text(str(os.getpid()))"
    fake.write_text(f"import os, pathlib, time; {write}; time.sleep(600)")
    deadline = Deadline(1.5)
    with hang_limit(8):
        solution = moccasin(layers("linear4_unit"), 4, deadline=deadline)
    assert solution.order is None
    assert deadline.hit
    assert not Path(f"/proc/{number.read_text()}").exists()
