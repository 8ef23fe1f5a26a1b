"""Let Ctrl-C end a search as its deadline would, so that the best plan so far is the result.

Where Python's own handler of SIGINT is installed, the first Ctrl-C stops a deadline, and the solver returns
at its next check. A second one raises KeyboardInterrupt. A handler of the program's own stays; if it raises,
no plan is returned. Other threads than the main one handle no signals.
"""

import signal
import threading
import warnings
from collections.abc import Generator
from types import FrameType

from remat_facade.errors import PlanningInterrupted
from remat_graph import Plan
from remat_graph.contexts import context
from remat_solvers import Deadline

INTERRUPTED = "interrupted"
"""Key of `Plan.solver_stats`: present, and true, if Ctrl-C ended the search for the plan."""


def interrupted(plan: Plan) -> bool:
    """Whether Ctrl-C ended the search for a plan, which is the best until then."""
    return bool(plan.solver_stats.get(INTERRUPTED))


def warn_of_interrupt(plan: Plan) -> None:
    """Warn that a plan is the best until Ctrl-C, and how far from the best of all it can be."""
    warnings.warn(
        f"planning was interrupted: the best plan so far has an overhead of {plan.overhead:+.2%}; no plan "
        f"has less than {plan.lower_bound_overhead:+.2%} (gap {plan.gap:.2%})",
        PlanningInterrupted,
        stacklevel=4,
    )


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

    signal.signal(signal.SIGINT, stop)
    try:
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
