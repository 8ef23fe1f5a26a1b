"""One search for a plan: the time that it has, and the line that shows how far it is."""

from collections.abc import Callable

import attrs

from remat_solvers import Deadline
from remat_solvers import Progress as SolverProgress


@attrs.define(kw_only=True, eq=False)
class PlanSearch:
    """The time of a search, and what is shown of it.

    Attributes:
        stage: what runs, and the best plan and the bound once they are known.
        base_s: seconds of the unplanned step, of which overheads are a ratio.
        show: called with the stage and the seconds so far.
        live: whether to call `show` also when only the seconds have changed.
        deadline: the time.
    """

    stage: str
    base_s: float
    show: Callable[[str], None]
    live: bool
    deadline: Deadline
    _shown_s: int = attrs.field(default=0, init=False)
    _known: str = attrs.field(default="", init=False)  # what was shown of the best plan and the bound

    def __attrs_post_init__(self) -> None:
        self.deadline.on_progress = self._report
        if self.live:
            self.deadline.on_check = self._check

    def begin(self, stage: str) -> None:
        """Show another stage."""
        self.stage = stage
        self._show()

    def _report(self, progress: SolverProgress) -> None:
        time_s, bound_s = progress.time_s, progress.lower_bound_s
        best = "no plan yet" if time_s is None else f"overhead {self._overhead(time_s):+z.2%}"
        known = f"{best}, bound {self._overhead(bound_s):+z.2%}"
        if known != self._known or self.live:  # else a part of the solver ended without a gain
            self._known = known
            self.begin(f"planning by {progress.solver}: {known}")

    def _overhead(self, time_s: float) -> float:
        return time_s / self.base_s - 1.0 if self.base_s > 0 else 0.0

    def _check(self) -> None:
        if int(self.deadline.elapsed_s) > self._shown_s:
            self._show()

    def _show(self) -> None:
        self._shown_s = int(self.deadline.elapsed_s)
        self.show(f"{self.stage}, {self._shown_s} s")
