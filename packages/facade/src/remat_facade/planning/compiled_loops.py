"""Compile the loops of searches before the clock of a search starts, and say so."""

from collections.abc import Callable

from remat_solvers import are_loops_compiled, compile_loops


def compile_first(on_progress: Callable[[str], None]) -> None:
    """Compile what a search runs, so that its limit is not spent on it."""
    if not are_loops_compiled():
        on_progress("compiling the loops of searches, once for this installation")
    compile_loops()
