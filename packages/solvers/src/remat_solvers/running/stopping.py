"""When a search ends: a limit by the clock if the user gives none, and Ctrl-C.

Where Python's own handler of SIGINT is installed, the first Ctrl-C stops a deadline, and the solver returns
the best plan so far at its next check. A second one raises KeyboardInterrupt. A handler of the program's own
stays; if it raises, no plan is returned. Other threads than the main one handle no signals.
"""

import signal
import threading
from collections.abc import Generator
from types import FrameType

from remat_graph import Plan
from remat_graph.contexts import context
from remat_solvers.protocol import Deadline

LIMIT_S, LARGE_LIMIT_S, LIMIT_OPS, LARGE_OPS = 20.0, 60.0, 1_000, 10_000
"""Seconds for planning if no limit is given: for small and for large graphs, and what these are, in ops."""

INTERRUPTED = "interrupted"
"""Key of `Plan.solver_stats`: present, and true, if Ctrl-C ended the search for the plan."""


def interrupted(plan: Plan) -> bool:
    """Whether Ctrl-C ended the search for a plan, which is the best until then."""
    return bool(plan.solver_stats.get(INTERRUPTED))


def default_limit_s(ops: int) -> float:
    """The limit by the clock for planning a graph of n ops, if the user gives none: linear between sizes."""
    large = (ops - LIMIT_OPS) / (LARGE_OPS - LIMIT_OPS)
    return LIMIT_S + (LARGE_LIMIT_S - LIMIT_S) * min(1.0, max(0.0, large))


@context
def stopped_by_interrupts(deadline: Deadline) -> Generator[None, None, None]:
    """A context in which the first Ctrl-C stops `deadline`.

    Raises:
        KeyboardInterrupt: an error ended the context after Ctrl-C, so there is no plan to return.
    """
    if not _default_handler_runs_here():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)  # first: the next one raises
        deadline.stop()

    try:
        signal.signal(signal.SIGINT, stop)
        yield
    except Exception as error:
        if deadline.stopped:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _default_handler_runs_here() -> bool:
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
