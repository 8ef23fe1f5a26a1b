"""`remat doctor`: its figures agree with other computations, and its page fits a terminal."""

import os
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings

from remat_facade.cli.app import main
from remat_facade.planning.method import Method
from remat_facade.report.doctor import Diagnosis, Stopwatch, TimePart, diagnose
from remat_facade.report.doctor_page import advice, doctor_tables, time_table
from remat_facade.report.held import (
    GRADIENTS,
    RETURNED,
    WORKSPACE,
    held_at_peak,
    held_by_layer,
    held_during,
)
from remat_graph import (
    Grads,
    Graph,
    Role,
    Schedule,
    format_nbytes,
    load_graph,
    noremat_peak_nbytes,
    save_graph,
    simulate,
)
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.strategies import schedules
from remat_solvers import min_budget, min_present_budget
from remat_solvers.bounds import budget_floor

from .corpus import GRAPHS

UNET = GRAPHS / "unet.json"

FACTORY = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        y = self.first(x)
        for block in self.blocks:
            y = block(y).tanh()
        return y.square().mean(), y

def make():
    return Two(), torch.randn(256, 16)
"""


def named(graph: Graph) -> Graph:
    """The same graph with layers."""
    ops = [attrs.evolve(op, layer=f"stage.{i % 3}.conv{i % 2}") for i, op in enumerate(graph.ops)]
    return attrs.evolve(graph, ops=ops)


@settings(deadline=None, max_examples=100)
@given(schedules())
def test_what_is_held_is_what_the_referee_counts(case: tuple[Graph, Schedule]) -> None:
    """At every step and in both states of `.grad`: value by value the same sum."""
    graph, schedule = case
    for grads in (Grads.NEW, Grads.PRESENT):
        during = simulate(graph, schedule, grads=grads).during_nbytes
        held = [held_during(graph, schedule, place, grads) for place in range(len(schedule.steps))]
        assert during == tuple(each.nbytes for each in held)
        by_layer = [held_by_layer(graph, each) for each in held]
        assert during == tuple(each.total() for each in by_layer)


@pytest.mark.parametrize("seed", range(20))
def test_the_floor_is_live_in_any_order(seed: int) -> None:
    """When its op first runs, whatever is recomputed."""
    graph = random_graph(seed, 8)
    floor = budget_floor(graph)
    op = next((i for i, op in enumerate(graph.ops) if op.name == floor.op), None)
    for order in (random_order(graph, n, forget=0.5) for n in range(5)):
        schedule = Schedule.from_order(graph, order)
        runs = [place for place, step in enumerate(schedule.steps) if getattr(step, "op", None) == op]
        place = schedule.boundary if op is None else runs[0]
        held = held_during(graph, schedule, place)
        taken_over = set() if op is None else {source for _, source in graph.ops[op].first.reuses}
        live = held.values.keys() | taken_over
        assert {v for v, nbytes in floor.held.items() if nbytes} <= live
        assert floor.nbytes <= held.nbytes


def test_the_layers_of_the_unplanned_peak() -> None:
    """Of a graph in trace order, where a value is live from its op to its last reader."""
    graph = named(load_graph(UNET))
    last = {v: i for i, op in enumerate(graph.ops) for v in (*op.first.outputs, *op.first.inputs)}
    moments = []
    for i in range(len(graph.ops)):
        live: Counter[str] = Counter()
        for maker, op in enumerate(graph.ops[: i + 1]):
            for v in op.first.outputs:
                if last[v] >= i:
                    live[f"stage.*.conv{maker % 2}"] += graph.values[v].nbytes
        moments.append(live)
    highest = max(range(len(moments)), key=lambda i: moments[i].total())
    held = held_at_peak(graph, Schedule.unplanned(graph))
    assert noremat_peak_nbytes(graph) == moments[highest].total() == held.nbytes
    assert graph.ops[highest].place == held.place
    found = held_by_layer(graph, held)
    assert moments[highest] == Counter({name: n for name, n in found.items() if n})


def test_gradients_outputs_and_workspace_have_rows_of_their_own() -> None:
    """Summed by their roles."""
    graph = random_graph(5, 9)
    schedule = Schedule.unplanned(graph)
    roles: Counter[Role] = Counter()
    for place in range(len(schedule.steps)):
        held = held_during(graph, schedule, place)
        found = held_by_layer(graph, held)
        of = dict.fromkeys(Role, 0)
        for v, nbytes in held.values.items():
            of[graph.values[v].role] += nbytes
        assert (found[GRADIENTS], found[RETURNED]) == (of[Role.GRAD], of[Role.OUTPUT] + of[Role.TANGENT])
        assert found[WORKSPACE] == held.workspace_nbytes
        roles.update({role: n for role, n in of.items() if n})
    assert {Role.GRAD, Role.OUTPUT, Role.ACTIVATION} <= roles.keys()


def test_a_stopwatch_divides_the_time() -> None:
    """No second is lost or counted twice; parts in a row with one name are one."""
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    watch = Stopwatch(clock=lambda: next(now))
    watch.end("capture")
    watch.end("greedy", 9.0, 4.0)
    watch.end("search", 8.0, 4.0)
    watch.end("search", None, 5.0)
    watch.skip()
    found = [(part.name, part.seconds, part.before_s, part.after_s) for part in watch.parts]
    assert [("capture", 1.0, None, None), ("greedy", 2.0, None, 9.0), ("search", 7.0, 9.0, 8.0)] == found
    assert (4.0, 5.0) == (watch.parts[-1].bound_before_s, watch.parts[-1].bound_after_s)


def diagnosed(graph: Graph, budget: int | str, gradients: str = "new") -> Diagnosis:
    """With a clock that counts, and a solver without annealing."""
    ticks = count()
    watch = Stopwatch(clock=lambda: float(next(ticks)))
    parameters = {"moves": 0}
    method = Method(gradients="present" if gradients == "present" else "new", parameters=parameters)
    return diagnose(graph, budget, method, watch=watch)


def test_a_diagnosis_of_a_stored_graph() -> None:
    """Its figures are those of the queries, the referee and the plan."""
    graph = named(load_graph(UNET))
    found = diagnosed(graph, "60%")
    plan, least = found.plan, min_budget(graph)
    assert found.searched
    assert (least.floor_nbytes, least.floor_op) == (found.floor.nbytes, found.floor.op)
    assert found.at_floor.nbytes == found.floor.nbytes
    assert found.planned.nbytes == plan.peak_nbytes <= found.asked_nbytes == plan.budget_nbytes
    assert found.unplanned.nbytes == noremat_peak_nbytes(graph)
    assert found.parts[-1].after_s == pytest.approx(plan.time_s)
    assert found.parts[-1].bound_after_s == pytest.approx(plan.lower_bound_s)
    assert ["floor", "greedy", "bound"] == [part.name for part in found.parts[:3]]
    # Every part but those that were joined took one tick.
    assert all(part.seconds >= 1.0 for part in found.parts)
    assert len({op.key for op in graph.ops}) == found.kinds

    step, memory, floor, _ = (table.rows for table in doctor_tables(found))
    figures = {row[0]: row[1:] for row in step}
    assert figures["no schedule exists below"][0] == format_nbytes(least.proven_nbytes)
    assert figures["of that, where one op runs"][0] == format_nbytes(least.floor_nbytes)
    assert figures["budget that was given"][2] == "60.0%"
    sizes = [format_nbytes(each.nbytes) for each in (found.unplanned, found.planned, found.at_floor)]
    assert [*sizes, "", ""] == list(memory[-1][1:])
    repeats = len(plan.schedule.order) - len(graph.ops)
    assert repeats == sum(int(row[4] or 0) for row in memory) > 0
    largest = max(found.floor.held, key=lambda v: found.floor.held[v])
    assert format_nbytes(found.floor.held[largest]) == floor[0][4]


@pytest.mark.parametrize("seed", [5, 7])
def test_a_budget_below_the_floor(seed: int) -> None:
    """The plan is that of the smallest budget, and the advice says that there is a proof."""
    graph = random_graph(seed, 9)
    least = min_budget(graph)
    found = diagnosed(graph, least.floor_nbytes - 1)
    assert found.plan.budget_nbytes == found.smallest.nbytes == least.nbytes
    assert "with proof" in advice(found)[0]
    assert not any("with proof" in line for line in advice(diagnosed(graph, least.nbytes)))


def test_advice_about_time() -> None:
    """From the seconds of the parts: what was measured, and the search after its last gain."""
    found = diagnosed(random_graph(5, 9), "90%")
    step_s = found.plan.noremat_time_s
    parts = (
        TimePart(name="measuring", seconds=8.0),
        TimePart(name="search", seconds=3.0, after_s=2 * step_s, bound_after_s=step_s),
        TimePart(
            name="search",
            seconds=9.0,
            before_s=2 * step_s,
            after_s=1.9999 * step_s,
            bound_before_s=step_s,
            bound_after_s=step_s,
        ),
    )
    said = advice(attrs.evolve(found, parts=parts, measured=(3, 7)))
    assert any("40% of the time went to measuring 3 of 7 kinds" in line for line in said)
    assert any("the last 9.00 s gained below 0.05%: --time-limit 4 ends before" in line for line in said)
    known = advice(
        attrs.evolve(found, parts=(parts[0], attrs.evolve(parts[1], seconds=9.0)), measured=(0, 7))
    )
    assert not any("measuring" in line or "ends before" in line for line in known)
    rows = time_table(parts, found.graph).rows
    assert ["40%", "15%", "45%"] == [row[2] for row in rows]
    assert ("+100.00% to +99.99%", "") == rows[2][3:]


def test_gradients_that_are_present() -> None:
    """The floor with them is the query's, and is what a diagnosis of that state finds."""
    graph = random_graph(5, 9)
    present = min_present_budget(graph)
    new = diagnosed(graph, "90%")
    assert new.floors_with['gradients="present"'] == present.floor_nbytes < new.floor.nbytes
    found = diagnosed(graph, "90%", "present")
    assert found.floor.nbytes == found.at_floor.nbytes == present.floor_nbytes
    assert 'gradients="present"' not in found.floors_with
    assert found.planned.nbytes == found.plan.peak_nbytes


def test_a_saved_graph_needs_no_torch() -> None:
    """The whole command, in a new process; the page fits a terminal of 80 columns."""
    code = (
        "import sys; from remat_facade.cli.app import main; "
        f"code = main(['doctor', {str(UNET)!r}, '--budget', '60%', '--time-limit', '4']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 70
    assert all(len(line) <= 80 for line in lines if not line.startswith("- "))


def test_a_model_is_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With capture and measuring; the floor with dropped outputs is that of a graph captured so."""
    (tmp_path / "made.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["doctor", "made.py:make", "--budget", "70%", "--time-limit", "4"]) == 0
    out = capsys.readouterr().out
    for word in ("Two: the step", "blocks.0", "capture", "measuring", "outputs and tangents"):
        assert word in out
    plan = ["plan", "made.py:make", "--budget", "100%", "--solver", "noremat", "--graph-out"]
    assert main([*plan, "kept.json"]) == main([*plan, "dropped.json", "--outputs", "dropped"]) == 0
    found = diagnosed(load_graph("kept.json"), "70%")
    dropped = budget_floor(load_graph("dropped.json")).nbytes
    assert found.floors_with['outputs="dropped"'] == dropped < found.floor.nbytes
    assert f"from {format_nbytes(found.floor.nbytes)} to {format_nbytes(dropped)}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.json"], "nowhere.json: no such file"),
        (["nowhere.py"], "expected nowhere.py:NAME"),
        ([__file__], "test_doctor.py:NAME"),
        (["nowhere.py:make"], "no such file nowhere.py"),
        ([str(UNET), "--budget", "2 bananas"], "bananas"),
        ([str(UNET), "--solver", "noremt"], "did you mean 'noremat'"),
        ([str(UNET), "--ways", "none"], "--ways is for a model: give MODULE:FACTORY, or leave it out"),
        (["nowhere.py:make", "--platform", "abacus"], "no cost platform 'abacus'"),
        (["nowhere.py:make", "--budget", "40"], "has no unit"),
        ([], "GRAPH.json|MODULE:FACTORY"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2."""
    assert main(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_names_of_a_file_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control codes in names of layers and values do not reach the terminal."""
    graph = random_graph(5, 4)
    ops = [attrs.evolve(op, layer="\x1b[31mred") for op in graph.ops]
    save_graph(attrs.evolve(graph, ops=ops), tmp_path / "graph.json")
    assert main(["doctor", str(tmp_path / "graph.json"), "--budget", "90%"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[31mred" in "".join(out.split())
    assert "\x1b" not in out
