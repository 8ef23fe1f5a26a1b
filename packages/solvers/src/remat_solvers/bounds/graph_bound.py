"""The bound of a graph without switches at one budget: the cut bound, and rounds that may raise it.

That of a relaxed graph, which allows whatever any decision of its switches does, bounds all of them.
"""

from remat_graph import Graph, noremat_peak_nbytes
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.coarse_time_bound import CoarseBound
from remat_solvers.bounds.reachability import reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.evaluation.arrays import flatten
from remat_solvers.protocol import Deadline

# Further rounds only where a plan is further from the bound than this ratio of base time, and while programs
# are small: HiGHS cannot be stopped within a linear program, which takes seconds at some 1,000 variables.
FAR, MOST_VARIABLES = 0.02, 1300
# Work as checks of HiGHS times variables, of 10 to 40 us each: of the first round, of all further ones, and
# of those after one that has raised the bound by `GREAT`, a ratio of base time.
FIRST_WORK, WORK, PER_GAIN = 50_000, 15_000, 160_000
GREAT = 0.01
CHECKS, LEAST_CHECKS = 50, 8  # the most of a round, and fewer than a round needs


class GraphBound:
    """The bound of a graph at one budget.

    Attributes:
        graph: without switches.
        budget_nbytes: bound on the peak.
        floor_nbytes: no schedule has a smaller peak.
    """

    def __init__(self, graph: Graph, budget_nbytes: int) -> None:
        self.graph, self.budget_nbytes = graph, budget_nbytes
        self._reach = reachability(graph)
        self.floor_nbytes = budget_floor(graph, self._reach).nbytes
        self._cut: CutBound | None = None
        self._coarse: CoarseBound | None = None  # of `round_s`

    @property
    def binding(self) -> str | None:
        """After `cut_s`: the name of the op at which its cut binds; None if it binds nowhere."""
        found = None if self._cut is None else self._cut.binding_op
        return None if found is None else self.graph.ops[found].name

    def cut_s(self, deadline: Deadline) -> float:
        """A lower bound on the compute seconds, by cuts; infinite if nothing fits."""
        if self.budget_nbytes < self.floor_nbytes:
            return float("inf")
        if noremat_peak_nbytes(self.graph) <= self.budget_nbytes:
            return self.graph.time_s
        self._cut = CutBound(self.graph, self._reach)
        return self.graph.time_s + self._cut.extra_s(self.budget_nbytes, deadline)

    def rounds_s(self, known_s: float, deadline: Deadline) -> float:
        """The bound of `cut_s`, raised by rounds of the coarse program while they are cheap and gain.

        Args:
            known_s: time of a known schedule; no higher bound is needed.
            deadline: limit by the clock.
        """
        base_s = lower_s = self.graph.time_s
        if self._cut is None:
            return base_s
        lower_s += self._cut.proven_s
        coarse = CoarseBound(self._cut, flatten(self.graph), self.budget_nbytes)
        checks, left = min(CHECKS, FIRST_WORK // len(self.graph.ops)), WORK
        while lower_s < known_s and checks and not (coarse.finished or deadline.reached()):
            variables = coarse.variables
            result = coarse.round(deadline, enough_s=known_s - base_s, checks=checks)
            raised_s = max(0.0, min(base_s + result.extra_s, known_s) - lower_s)
            lower_s += raised_s
            if not result.ended or known_s - lower_s < FAR * base_s or coarse.variables > MOST_VARIABLES:
                break
            left -= result.checks * variables
            left = max(left, round(PER_GAIN * min(1.0, raised_s / (GREAT * base_s))))
            checks = min(CHECKS, left // max(1, coarse.variables))
            checks = checks if checks >= LEAST_CHECKS else 0
        return lower_s

    def round_s(self, known_s: float, deadline: Deadline) -> float | None:
        """The bound of `cut_s`, raised by one more round of any size; None if no round can raise it."""
        if self._cut is None:
            return None
        if self._coarse is None:
            arrays = flatten(self.graph)
            self._coarse = CoarseBound(self._cut, arrays, self.budget_nbytes, thorough=True)
        if self._coarse.finished:
            return None
        base_s = self.graph.time_s
        return base_s + self._coarse.round(deadline, enough_s=known_s - base_s).extra_s
