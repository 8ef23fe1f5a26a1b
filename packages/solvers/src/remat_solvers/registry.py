"""Solvers by name: the entry-point group ``remat.solvers``, so that any package can add one."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature

from remat_graph.errors import text_of
from remat_solvers.errors import BadParameter, UnknownSolver
from remat_solvers.protocol import Solver

GROUP = "remat.solvers"


@cache
def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def solver_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_registered()))


def check_solver_name(name: str) -> None:
    """Check that a solver has this name, without loading it.

    Raises:
        UnknownSolver: no such name.
    """
    if name not in _registered():
        raise UnknownSolver(name=name, known=solver_names())


def solver_parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that a solver takes.

    Raises:
        UnknownSolver: no such name.
    """
    check_solver_name(name)
    return tuple(signature(_registered()[name].load()).parameters)


def about_solver(name: str) -> str:
    """What a solver does, in one line, or why it cannot be loaded: a broken package ends no list."""
    try:
        return (type(get_solver(name)).__doc__ or "").strip().partition("\n")[0]
    except ImportError as error:
        return f"cannot be loaded: {text_of(error)}"


def get_solver(name: str, **parameters: object) -> Solver:
    """Make a solver.

    Args:
        name: as registered.
        **parameters: the fields of the solver's class.

    Raises:
        UnknownSolver: no such name.
        BadParameter: the solver does not accept a parameter, or its value.
    """
    check_solver_name(name)
    factory = _registered()[name].load()
    try:
        solver: Solver = factory(**parameters)
    except (TypeError, ValueError) as error:
        problem = str(error.args[0] if error.args else error)
        raise BadParameter(solver=name, problem=problem) from error
    return solver
