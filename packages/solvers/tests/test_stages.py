"""The stage form's exact methods equal brute force over their own space, and the published optima."""

import json

import attrs
import pytest

from remat_graph import Graph, Placement, Role, Value, noremat_peak_nbytes
from remat_solvers import BadParameter, Deadline, Problem
from remat_solvers.methods.checkmate import ACCOUNTINGS, Checkmate
from remat_solvers.methods.checkmate_lp import CheckmateLP
from remat_solvers.methods.moccasin import Moccasin
from remat_solvers.testing import layer_graph, random_graph

from . import stage_oracle
from .corpus import ORACLES

OPTIMA = {
    "linear4_unit": {3: 15, 4: 11, 5: 10, 6: 9},
    "linear8_unit": {3: 45, 4: 26, 5: 22, 6: 21, 7: 20, 8: 19, 9: 18, 10: 17},
    "linear16_unit": {7: 44, 8: 43, 10: 41, 12: 39},
    "VGG19_flops_b1": {51_380_224: 58_982_891_520, 66_633_728: 58_896_187_392},
    "VGG16_flops_b1": {51_380_224: 46_497_497_088},
}


def layers(name: str) -> Graph:
    """A layer-level graph of the oracles."""
    return layer_graph(json.loads((ORACLES / f"{name}.json").read_text()))


SLOW = {("linear8_unit", 3), ("linear8_unit", 4), *(("linear16_unit", budget) for budget in (7, 8, 10, 12))}
SLOWEST = ("linear16_unit", 7)  # in the referee's accounting too


@pytest.mark.parametrize(
    ("name", "budget", "optimum", "accounting"),
    [
        pytest.param(name, budget, best, accounting, marks=[pytest.mark.full] if slow else [])
        for name, found in OPTIMA.items()
        for budget, best in found.items()
        for accounting in ACCOUNTINGS
        for slow in [(name, budget) == SLOWEST or (accounting == "paper" and (name, budget) in SLOW)]
    ],
)
def test_checkmate_reproduces_the_known_optima(name: str, budget: int, optimum: int, accounting: str) -> None:
    """Proven optimal in the paper's accounting and in ours; the referee agrees with the figure."""
    solution = Checkmate(accounting=accounting).solve(Problem(layers(name), budget))
    assert solution.time_s == optimum
    assert solution.stats.get("proven", True) is True
    if accounting == "paper":
        assert solution.stats["paper_time_s"] == optimum
        assert solution.stats["paper_peak_nbytes"] == solution.peak_nbytes


@pytest.mark.parametrize("seed", range(12))
def test_checkmate_equals_brute_force_over_its_space(seed: int) -> None:
    """On random graphs, at budgets from tight to loose."""
    compare(seed, ops=3 + seed % 5)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 512))
def test_checkmate_equals_brute_force_on_many(seed: int) -> None:
    """On 500 of at most 12 ops."""
    compare(seed, ops=3 + seed % 10)


def compare(seed: int, ops: int) -> None:
    """The program's optimum beside the brute force's."""
    graph = random_graph(seed, ops=ops, fancy=False)
    peak = noremat_peak_nbytes(graph)
    for fraction in (0.6, 0.75, 0.9):
        budget = int(fraction * peak)
        solution = Checkmate().solve(Problem(graph, budget))
        least = stage_oracle.fastest_s(graph, budget)
        if solution.time_s is None:
            assert least == float("inf")
        else:
            assert solution.time_s == pytest.approx(least)


def test_exact_whatever_the_unit_of_time() -> None:
    """Operators of a tenth of a microsecond: the optimum does not hide below a solver's tolerance."""
    for seed in range(20):
        graph = random_graph(seed, ops=8, fancy=False)
        quick = attrs.evolve(
            graph,
            ops=[
                attrs.evolve(
                    op,
                    implementations=[attrs.evolve(w, time_s=w.time_s * 1e-7) for w in op.implementations],
                )
                for op in graph.ops
            ],
        )
        peak = noremat_peak_nbytes(graph)
        for fraction in (0.75, 0.9):
            found = Checkmate().solve(Problem(quick, int(fraction * peak))).time_s
            least = stage_oracle.fastest_s(quick, int(fraction * peak))
            assert (found or float("inf")) == pytest.approx(least, rel=1e-9)


def test_an_unread_tangent_and_host_values_are_counted_as_the_referee_does() -> None:
    """What nobody reads is held from the boundary on; what lives on the host costs the device nothing."""
    graph = random_graph(5, ops=8, fancy=False)
    values = [
        *graph.values,
        Value(name="unread", nbytes=7, role=Role.TANGENT, of=graph.outputs[0]),
        Value(name="elsewhere", nbytes=1000, placement=Placement.HOST),
    ]
    more = attrs.evolve(graph, values=values)
    peak = noremat_peak_nbytes(more)
    plain = noremat_peak_nbytes(graph)
    for fraction in (0.7, 0.8, 0.9):
        budget = int(fraction * peak)
        found = Checkmate().solve(Problem(more, budget)).time_s
        assert (found or float("inf")) == pytest.approx(stage_oracle.fastest_s(more, budget))
    assert plain <= peak <= plain + 7


@pytest.mark.parametrize("backend", ["NOPE", "CLARABEL"])
def test_a_backend_that_cannot(backend: str) -> None:
    """One line that names those that can."""
    graph = layers("linear4_unit")
    with pytest.raises(BadParameter, match=r"no such mixed-integer solver installed; choose from .*HIGHS"):
        Checkmate(backend=backend).solve(Problem(graph, 4))


def test_a_program_too_large_for_its_deadline_is_given_up() -> None:
    """Nothing is found, nothing is proven, and the deadline is reported as hit."""
    graph = layers("linear16_unit")
    deadline = Deadline(0.0)
    solution = Checkmate().solve(Problem(graph, 8), deadline)
    assert solution.order is None
    assert solution.stats == {"proven": False}
    assert deadline.hit


@pytest.mark.parametrize("solver", [Checkmate(), Checkmate(accounting="paper"), Moccasin()])
def test_below_the_floor_nothing_is_branched_on(solver: Checkmate | Moccasin) -> None:
    """One op of the chain reads two values and makes one: two units cannot do, and no program is written."""
    solution = solver.solve(Problem(layers("linear16_unit"), 2))
    assert solution.order is None
    assert solution.stats == {"proven": True}


def test_a_part_that_runs_out_of_time_tells_the_whole() -> None:
    """A plan whose part was cut short says so; the whole still has time."""
    whole = Deadline(1000.0)
    part = whole.within(0.0)
    assert part.reached()
    assert whole.hit
    assert not whole.reached()
    assert whole.within(None).remaining_s <= 1000.0
    assert Deadline().within(None).seconds is None


def test_moccasin_is_bound_by_its_number_of_computations() -> None:
    """A chain that needs a third run: with C = 2 the optimum is another, with C large it is Checkmate's."""
    graph = layers("linear8_unit")
    exact = Checkmate().solve(Problem(graph, 4))
    assert Moccasin(computations=9).solve(Problem(graph, 4)).time_s == exact.time_s
    runs = Moccasin(computations=2).solve(Problem(graph, 5)).order
    assert runs is not None
    assert max(runs.count(op) for op in runs) <= 2
    assert Moccasin(computations=1).solve(Problem(graph, 5)).order is None


@pytest.mark.parametrize("name", ["linear16_unit", "VGG16_flops_b1"])
def test_the_relaxation_is_rounded_to_a_plan_that_fits(name: str) -> None:
    """Not below the optimum, not above the budget, and its relaxation is a bound."""
    budget, optimum = next(iter(OPTIMA[name].items()))
    solution = CheckmateLP().solve(Problem(layers(name), budget))
    assert solution.time_s is not None
    assert solution.peak_nbytes is not None
    assert solution.time_s >= optimum
    assert solution.peak_nbytes <= budget
    assert float(solution.stats["relaxation_s"]) <= optimum - layers(name).time_s + 1e-6 * optimum
