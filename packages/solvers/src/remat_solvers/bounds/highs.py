"""Integer programs solved by HiGHS directly: with its proven bound, and with a limit on counted work.

The registered methods state their programs in cvxpy, which takes any solver. cvxpy returns neither the bound
of a solver that stopped early nor a stop that does not depend on the clock; the coarse bound needs both.
"""

import warnings
from typing import Any

import attrs
import numpy as np

from remat_solvers.errors import SolverWarning
from remat_solvers.evaluation.arrays import Floats, Ints
from remat_solvers.protocol import Deadline

STRICT = 1e-9
"""Tolerance of reduced costs and whole numbers in a strict proof; 1e-7 and 1e-6 otherwise."""


@attrs.frozen(kw_only=True, eq=False)
class ProgramResult:
    """The result of a program."""

    found: Floats | None  # values of the variables; None if there are none
    # no solution costs less; minus infinity if nothing is proven, infinity if there is no solution
    bound: float
    ended: bool  # whether the search ended with the gap closed
    checks: int = 0  # how often HiGHS called back


class MixedIntegerProgram:
    """``minimize cost @ x  subject to  lower <= rows @ x <= upper``, every x 0 or 1; built row by row."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._begins: list[int] = [0]
        self._columns: list[int] = []
        self._entries: list[float] = []

    def variable(self, cost: float) -> int:
        """Add a variable; returns its index."""
        self.cost.append(cost)
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """``lower <= sum of coefficient * variable <= upper``; each variable at most once."""
        self._lower.append(lower)
        self._upper.append(upper)
        for column, entry in terms:
            self._columns.append(column)
            self._entries.append(entry)
        self._begins.append(len(self._columns))

    def minimize(
        self,
        *,
        gap: float,
        enough: float,
        deadline: Deadline,
        checks: int | None = None,
        strict: bool = False,
    ) -> ProgramResult:
        """Minimize until the relative gap is below `gap` or the bound is proven to be at least `enough`.

        HiGHS may call back `checks` times, which counts its work without a clock. If `strict`, prove at
        tolerances that rounding hardly exceeds, which takes several times as long.
        """
        import highspy

        if deadline.reached():
            return ProgramResult(found=None, bound=-np.inf, ended=False)
        count = len(self.cost)
        if not count:
            return ProgramResult(found=np.zeros(0), bound=0.0, ended=True)
        highs = highspy.Highs()
        highs.silent()
        highs.passModel(self._model(highspy))
        # "off" instead of one thread, because a process keeps the thread count of its first program.
        options = {"parallel": "off", "mip_rel_gap": gap, "mip_abs_gap": 1e-9}
        if deadline.seconds is not None:  # HiGHS calls back rarely within a linear program
            options["time_limit"] = deadline.remaining_s
        if strict:
            options |= {"dual_feasibility_tolerance": STRICT, "mip_feasibility_tolerance": STRICT}
        for option, value in options.items():
            highs.setOptionValue(option, value)
        asked = 0

        def on_check(event: Any) -> None:
            nonlocal asked
            asked += 1
            stop = checks is not None and asked > checks
            if stop or event.data_out.mip_dual_bound >= enough or deadline.reached():
                event.interrupt()

        highs.cbMipInterrupt.subscribe(on_check)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status in (highspy.HighsModelStatus.kSolveError, highspy.HighsModelStatus.kModelError):
            warnings.warn(
                "HiGHS failed to solve a program of the lower bound: the bound stays lower",
                SolverWarning,
                stacklevel=2,
            )
            return ProgramResult(found=None, bound=-np.inf, ended=False, checks=asked)
        if status == highspy.HighsModelStatus.kInfeasible:
            return ProgramResult(found=None, bound=np.inf, ended=True, checks=asked)
        if status == highspy.HighsModelStatus.kTimeLimit:
            deadline.mark()
        found = None
        if info.primal_solution_status == 2:  # feasible
            found = np.array(highs.getSolution().col_value)
        bound = float(info.mip_dual_bound)
        return ProgramResult(
            found=found,
            bound=bound if np.isfinite(bound) else -np.inf,
            ended=status == highspy.HighsModelStatus.kOptimal,
            checks=asked,
        )

    def _model(self, highspy: Any) -> Any:
        count = len(self.cost)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = count, len(self._lower)
        model.col_cost_ = np.array(self.cost)
        model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
        model.row_lower_, model.row_upper_ = np.array(self._lower), np.array(self._upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = _indices(self._begins)
        model.a_matrix_.index_ = _indices(self._columns)
        model.a_matrix_.value_ = np.array(self._entries)
        model.integrality_ = [highspy.HighsVarType.kInteger] * count
        return model


def _indices(numbers: list[int]) -> Ints:
    made: Ints = np.array(numbers, np.int32)
    return made
