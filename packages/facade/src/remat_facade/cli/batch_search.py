"""The search for the largest batch by several methods, each with a limit, and what fits without a plan."""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from time import monotonic

import attrs

from remat_graph.contexts import context
from remat_solvers import Deadline, MaxBatch, Problem, Solution, Solver
from remat_solvers.running.stopping import default_limit_s

Solve = Callable[[Solver, Problem, Deadline | None], Solution]
"""Runs a solver."""

SIZE_SHARE = 0.25  # of the limit of a plan, for one size of a batch: 5 s up to 1,000 ops


class TimeUp(Exception):
    """The time of a search is up, and something is known."""


class BatchClock:
    """The time that the search for the largest batch by one method may take.

    Nothing else ends a search of many sizes: each is measured, which takes as long as some steps. The first
    size has no limit but that of its plan. A capture cannot be ended, so no size begins in less time than a
    size up to it has taken; the first does not count, in which libraries are imported too.

    Args:
        limit_s: seconds for each method.
        now: the clock.

    Attributes:
        cut: whether a plan was not found because the time was up.
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._any_size = False  # whether a size has begun
        self._taken_s: dict[int, float] = {}  # by size, without the first
        self.begin()

    def begin(self) -> None:
        """The search of a method begins."""
        self._deadline = Deadline(self._limit_s, clock=self._now)
        self._known = self.cut = False

    def know(self) -> None:
        """A size is known to fit, so there is a result."""
        self._known = True

    def check(self, *_: object) -> None:
        """Raise `TimeUp` if there is a result and no time left."""
        if self._known and self._deadline.reached():
            raise TimeUp

    @context
    def size(self, batch: int) -> Generator[None, None, None]:
        """Capture and measure a size; `TimeUp` if there is a result and too little time left for it."""
        self.check()
        least_s = max((taken_s for size, taken_s in self._taken_s.items() if size <= batch), default=0.0)
        if self._known and self._deadline.remaining_s < least_s:
            raise TimeUp
        first, self._any_size = not self._any_size, True
        began_s = self._now()
        yield
        if not first:
            self._taken_s[batch] = self._now() - began_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 1 for the plan of a size that has been measured."""
        return max(1.0, self._deadline.remaining_s) if self._known else float("inf")


@attrs.frozen(kw_only=True, eq=False)
class Largest:
    """The largest batch by each method, and why a larger one may fit.

    Attributes:
        found: by the names of methods.
        out_of_time: methods whose search was ended, by their time or by Ctrl-C.
        interrupted: whether Ctrl-C ended the last of them.
    """

    found: dict[str, MaxBatch]
    out_of_time: tuple[str, ...] = ()
    interrupted: bool = False


def largest(search: Callable[..., MaxBatch], solvers: Sequence[str], clock: BatchClock) -> Largest:
    """The largest batch by each method; after Ctrl-C or at the end of the time, the largest until then.

    Args:
        search: `max_batch` with all arguments but ``solver`` and ``on_fit``.
        solvers: names of methods.
        clock: checked by the graphs of `search`.

    Raises:
        KeyboardInterrupt: no batch is known to fit yet.
    """
    found: dict[str, MaxBatch] = {}
    late: list[str] = []

    def fits(name: str, made: MaxBatch) -> None:
        found[name] = made
        clock.know()

    for name in solvers:
        clock.begin()
        try:
            found[name] = search(solver=name, on_fit=partial(fits, name))
            if clock.cut:
                late.append(name)
        except TimeUp:
            late.append(name)
        except KeyboardInterrupt:
            if not found:
                raise
            late += [name] if name in found else []
            return Largest(found=found, out_of_time=tuple(late), interrupted=True)
    return Largest(found=found, out_of_time=tuple(late))


@attrs.frozen(kw_only=True)
class Unplanned:
    """The largest batch whose unplanned step stays within a budget.

    Attributes:
        batch: its size; 0 if not even one sample fits.
        exact: whether the next size is known not to fit; else `batch` is read off a line through two sizes,
            because the bytes of a step grow in proportion to its batch.
    """

    batch: int
    exact: bool

    @classmethod
    def between(cls, peaks: Mapping[int, int], budget_nbytes: int) -> "Unplanned | None":
        """Read it off the peaks of some sizes; None if none fits and smaller ones were not tried.

        Args:
            peaks: batch sizes and the peak of the unplanned step of each, in bytes.
            budget_nbytes: the budget.
        """
        batch = max((size for size, nbytes in peaks.items() if nbytes <= budget_nbytes), default=0)
        if not batch and 1 not in peaks:
            return None
        above = min((size for size in peaks if size > batch), default=None)
        if not batch or above == batch + 1:
            return cls(batch=batch, exact=True)
        # The line through two sizes: the largest that fits and the next that was tried, or the one before.
        other = above or max((size for size in peaks if size < batch), default=batch)
        grows = (peaks[other] - peaks[batch]) / (other - batch) if other != batch else 0.0
        more = int((budget_nbytes - peaks[batch]) / grows) if grows > 0 else 0
        return cls(batch=batch + more if above is None else min(batch + more, above - 1), exact=False)

    def __str__(self) -> str:
        return f"{self.batch}" if self.exact else f"about {self.batch}"


def at_most(solve: Solve, clock: BatchClock) -> Solve:
    """The function with a limit for one size of a batch, because `largest` plans many."""

    def limited(solver: Solver, problem: Problem, deadline: Deadline | None) -> Solution:
        whole_s = SIZE_SHARE * default_limit_s(len(problem.graph.ops))
        limit = Deadline(min(whole_s, clock.left_s))
        solution = solve(solver, problem, limit)
        clock.cut |= not solution.feasible and clock.left_s < whole_s and limit.reached()
        return solution

    return limited
