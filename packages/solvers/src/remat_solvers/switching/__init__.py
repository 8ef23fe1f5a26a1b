"""Graphs with switches: plans of the fastest decision that is found, and of the smallest peak."""

from remat_solvers.switching.compiled import are_loops_compiled, compile_first, compile_loops
from remat_solvers.switching.second_search import solve_twice
from remat_solvers.switching.smallest_peak import smallest_peak
from remat_solvers.switching.solving import solve_switches

__all__ = [
    "are_loops_compiled",
    "compile_first",
    "compile_loops",
    "smallest_peak",
    "solve_switches",
    "solve_twice",
]
