"""Solvers are found by name, and importing the package stays cheap."""

import subprocess
import sys

import pytest

from remat_solvers import BadParameter, Solver, UnknownSolver, get_solver, solver_names, solver_parameters

NAMES = (
    *(
        "auto",
        "noremat",
        "checkpoint_ap",
        "chen_sqrt",
        "chen_sqrt_linear",
        "chen_greedy",
        "chen_greedy_linear",
    ),
    *(
        "greedy",
        "griewank",
        "mincut",
        "interval_dp",
        "rotor",
        "pofo",
        "twremat",
        "checkmate",
        "checkmate_lp",
        "monet",
        "moccasin",
    ),
    *("rockmate", "hilp", "hiremate", "search"),
)


@pytest.mark.parametrize("name", NAMES)
def test_named_solvers_are_registered(name: str) -> None:
    """Each is there under its own name and follows the protocol."""
    assert name in solver_names()
    solver = get_solver(name)
    assert isinstance(solver, Solver)
    assert name == solver.name


def test_an_unknown_name_gets_a_suggestion() -> None:
    """One line, with the closest name and all of them."""
    with pytest.raises(UnknownSolver, match=r"did you mean 'greedy'\? \(known: .*auto"):
        get_solver("gredy")


@pytest.mark.parametrize("parameters", [{"sede": 1}, {"moves": -1}, {"moves": "many"}])
def test_a_bad_parameter_is_named(parameters: dict[str, object]) -> None:
    """Unknown parameters and values out of range name the solver."""
    with pytest.raises(BadParameter, match="solver 'search'"):
        get_solver("search", **parameters)


# Compared with what there is (ops, attempts), or what the clock cuts in on: nothing is made for each.
HARMLESS = {"leaf", "exact", "moves", "seed", "every", "candidates", "computations", "gap", "gap_s"}
HARMLESS |= {"starts", "hot", "cold", "block_seconds", "leaf_seconds", "top_seconds", "guest_seconds"}


@pytest.mark.parametrize("name", NAMES)
def test_every_count_that_drives_a_loop_has_a_bound(name: str) -> None:
    """What is made for each slot or stage is not made 10 to the 15th times."""
    for parameter in set(solver_parameters(name)) - HARMLESS:
        if type(getattr(get_solver(name), parameter)) is int:
            with pytest.raises(BadParameter, match=f"'{parameter}' must be <= "):
                get_solver(name, **{parameter: 10**15})


def test_importing_loads_nothing_heavy() -> None:
    """No torch, numba or cvxpy before they are needed."""
    code = "import sys, remat_solvers; print([m for m in ('torch', 'numba', 'cvxpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
