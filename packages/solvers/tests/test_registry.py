"""Solvers are found by name, and importing the package stays cheap."""

import subprocess
import sys

import pytest

from remat_solvers import BadParameter, Solver, UnknownSolver, get_solver, solver_names

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


def test_importing_loads_nothing_heavy() -> None:
    """No torch, numba or cvxpy before they are needed."""
    code = "import sys, remat_solvers; print([m for m in ('torch', 'numba', 'cvxpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
