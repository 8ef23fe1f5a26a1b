"""The interface between a solver and its caller: a problem and a deadline in, a solution out.

A solver is any object with a `name` and `solve(problem, deadline) -> Solution`. That no schedule exists is a
result and not an exception; a solver past its deadline returns its best valid schedule.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from operator import index
from typing import Any, Protocol, runtime_checkable

import attrs

from remat_graph import Graph, InvalidSchedule, Links, Schedule, Start, Timeline, simulate
from remat_graph.errors import shown

MOST_PARTS, MOST_SLOTS, MOST_PASSES = 1_000, 10_000, 10_000
"""Upper limits of parameters: stages, levels or options; memory levels; micro-batches."""


@attrs.frozen(eq=False)
class Problem:
    """Find the fastest schedule of `graph` that never holds more than `budget_nbytes`.

    Attributes:
        graph: the training step.
        budget_nbytes: bound on the referee's `peak_nbytes`.
        links: bandwidths to the host and back; None if nothing may be offloaded. A solver without offloading
            ignores them.
        host_budget_nbytes: bound on the referee's `host_peak_nbytes`; None for no bound.
    """

    graph: Graph
    budget_nbytes: int = attrs.field(converter=int, validator=attrs.validators.ge(0))
    links: Links | None = None
    host_budget_nbytes: int | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(int),
        validator=attrs.validators.optional(attrs.validators.ge(0)),
    )


class Status(StrEnum):
    """How a solve ended; the value is the advice that goes with it."""

    OPTIMAL = "Optimal: no valid schedule within the budget is faster."
    FEASIBLE = "Feasible: a valid schedule within the budget; more time may find a faster one."
    INFEASIBLE = (
        "Infeasible, with proof: no schedule fits the budget. Raise the budget or use a smaller batch."
    )
    NOT_FOUND = "No schedule was found, but one may exist. Try solver 'auto', more time or a larger budget."


@attrs.frozen(kw_only=True)
class Progress:
    """A report of a running solver.

    Attributes:
        solver: its name, or that of the part of it that has ended.
        elapsed_s: seconds since the solve began.
        time_s: the best valid schedule's compute time so far, None before the first.
        lower_bound_s: the bound known so far.
    """

    solver: str
    elapsed_s: float
    time_s: float | None
    lower_bound_s: float


@attrs.define(eq=False)
class Deadline:
    """A limit on a solver's time by the clock; `stop` ends the time at once.

    Results are deterministic unless the deadline ends a solve early; `hit` says whether it did.

    Attributes:
        seconds: allowed from now on; None for no limit but the solver's own work limit.
        on_progress: called when a part of a solver ends, and with each improvement.
        hit: whether a solver stopped because time was up.
        clock: returns seconds, in any thread; a test can replace it by a counter.
        on_check: called when a solver asks whether time is up, many times a second.
    """

    seconds: float | None = None
    on_progress: Callable[[Progress], None] | None = None
    hit: bool = False
    clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    on_check: Callable[[], None] | None = attrs.field(default=None, kw_only=True)
    _start: float = attrs.field(init=False)
    _stopped: bool = attrs.field(default=False, init=False)
    _whole: "Deadline | None" = attrs.field(default=None, kw_only=True)

    @_start.default
    def _now(self) -> float:
        return self.clock()

    def within(self, seconds: float | None) -> "Deadline":
        """A deadline for a part, at most the remaining time; where it is hit, so is the whole."""
        left = self.remaining_s if seconds is None else min(seconds, self.remaining_s)
        limit_s = None if left == float("inf") else left
        return Deadline(limit_s, clock=self.clock, on_check=self.on_check, whole=self)

    def share(self, part: float) -> "Deadline":
        """A deadline for a part that may take this share of the remaining time, between 0 and 1."""
        return self.within(None if self.seconds is None else part * self.remaining_s)

    def unwatched(self) -> "Deadline":
        """A deadline for a part in another thread: it calls neither `on_progress` nor `on_check`."""
        part = self.within(None)
        part.on_check = None
        return part

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return self.clock() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left; infinite without a limit."""
        if self.stopped:
            return 0.0
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.elapsed_s)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called for this deadline or the whole of which it is a part."""
        return self._stopped or (self._whole is not None and self._whole.stopped)

    def stop(self) -> None:
        """End the time now, for all parts too; another thread or a signal handler may call it."""
        self._stopped = True

    def reached(self) -> bool:
        """Whether time is up. Call only where a True ends work early: it is recorded in `hit`."""
        if self.on_check is not None:
            self.on_check()
        if self.remaining_s > 0.0:
            return False
        self.mark()
        return True

    def mark(self) -> None:
        """Record that time was up for a part of the work."""
        self.hit = True
        if self._whole is not None:
            self._whole.mark()

    def report(self, solver: str, time_s: float | None, lower_bound_s: float) -> None:
        """Report progress to the caller, if it listens."""
        if self.on_progress is not None:
            progress = Progress(
                solver=solver, elapsed_s=self.elapsed_s, time_s=time_s, lower_bound_s=lower_bound_s
            )
            self.on_progress(progress)


@attrs.frozen(kw_only=True)
class Shortage:
    """Larger budgets to plan with, where none was found for the given ones.

    Attributes:
        nbytes: device budget, not below the given one.
        host_nbytes: host budget, not below the given one; the host bytes of such a plan if none was given.
        sufficient: whether a plan was found for these budgets; otherwise they are an estimate.
    """

    nbytes: int
    host_nbytes: int
    sufficient: bool


@attrs.frozen(kw_only=True, eq=False)
class Solution:
    """The result of a solver.

    Attributes:
        status: how it ended.
        schedule: the best valid schedule within the budget, or None.
        lower_bound_s: no valid schedule's compute time (first runs included) is below this; from a solver
            without offloading, no schedule without offloading.
        base_s: compute time of the unplanned step.
        time_s: seconds of `schedule` according to the referee, until its last lane ends: its compute time
            without offloading.
        peak_nbytes: its peak according to the referee.
        stats: counters of the solver.
        on_host: indices of the values that `schedule` has placed on the host.
        explanation: lines that say why each class of tensor is placed where it is.
        smallest_nbytes: if nothing was found, the smallest peak of any schedule seen.
        shortage: if nothing was found, larger budgets to plan with.
    """

    status: Status
    schedule: Schedule | None
    lower_bound_s: float
    base_s: float
    time_s: float | None = None
    peak_nbytes: int | None = None
    stats: Mapping[str, int | float | str | bool] = attrs.field(factory=dict)
    on_host: frozenset[int] = frozenset()
    explanation: tuple[str, ...] = ()
    smallest_nbytes: int | None = None
    shortage: Shortage | None = None

    @property
    def feasible(self) -> bool:
        """Whether there is a schedule."""
        return self.schedule is not None

    @property
    def order(self) -> tuple[int, ...] | None:
        """The schedule's op indices, repeats included."""
        return None if self.schedule is None else self.schedule.order

    @property
    def overhead(self) -> float | None:
        """Extra time over the unplanned step's compute time, as a ratio: repeats, and waits for transfers."""
        if self.time_s is None:
            return None
        return self.time_s / self.base_s - 1.0 if self.base_s > 0 else 0.0

    @property
    def lower_bound_overhead(self) -> float:
        """The lower bound as a ratio of extra time."""
        ratio = self.lower_bound_s / self.base_s - 1.0 if self.base_s > 0 else 0.0
        return ratio if (self.overhead or 0.0) < 0 else max(0.0, ratio)


@runtime_checkable
class Solver(Protocol):
    """A method that finds schedules; its parameters are those of its constructor."""

    @property
    def name(self) -> str:
        """The name it is registered under."""
        ...

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Find a schedule within the budget.

        Args:
            problem: graph and budget.
            deadline: limit by the clock.
        """
        ...


def part_count(default: int, least: int = 1) -> Any:
    """A field that counts stages, levels or options."""
    return limited_count(default, least, MOST_PARTS)


def level_count(default: int, least: int = 2) -> Any:
    """A field that counts memory levels."""
    return limited_count(default, least, MOST_SLOTS)


def limited_count(default: int, least: int, most: int) -> Any:
    """A field with limits; other values raise ValueError."""
    validators = attrs.validators
    return attrs.field(default=default, validator=validators.and_(validators.ge(least), validators.le(most)))


def time_limit(default: float | None) -> Any:
    """A field with a limit in seconds above 0; None for no limit. Other values raise ValueError."""

    def check(_: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and not value > 0:
            raise ValueError(
                f"{field.name} must be seconds above 0, or None for no limit, got {shown(value)}"
            )

    return attrs.field(default=default, validator=check)


def judge(
    problem: Problem,
    order: Iterable[int] | None,
    *,
    lower_bound_s: float = 0.0,
    stats: Mapping[str, int | float | str | bool] | None = None,
) -> Solution:
    """Let the referee decide the value of a solver's order of ops.

    Args:
        problem: graph and budget.
        order: op indices, or None if the solver found none.
        lower_bound_s: a valid bound, if the solver has one above the time of all first runs.
        stats: passed on.
    """
    schedule = None
    if order is not None:
        try:
            schedule = Schedule.from_order(problem.graph, map(index, order))
        except InvalidSchedule:
            schedule = None
    return judge_schedule(problem, schedule, lower_bound_s=lower_bound_s, stats=stats)


def judge_schedule(
    problem: Problem,
    schedule: Schedule | None,
    *,
    lower_bound_s: float = 0.0,
    stats: Mapping[str, int | float | str | bool] | None = None,
) -> Solution:
    """Let the referee decide the value of a solver's schedule with transfers.

    Args:
        problem: graph, budgets and links.
        schedule: the steps, or None if the solver found none.
        lower_bound_s: a valid bound, if the solver has one above the time of all first runs.
        stats: passed on.
    """
    base_s = problem.graph.time_s
    bound_s = max(base_s, lower_bound_s)
    timeline = None if schedule is None else _timeline(problem, schedule)
    if timeline is None:
        status = Status.NOT_FOUND
    else:
        status = Status.OPTIMAL if timeline.time_s <= bound_s * (1 + 1e-12) else Status.FEASIBLE
        bound_s = min(bound_s, timeline.time_s)  # rounding must not put it above
    return Solution(
        status=status,
        schedule=None if timeline is None else schedule,
        lower_bound_s=bound_s,
        base_s=base_s,
        time_s=None if timeline is None else timeline.time_s,
        peak_nbytes=None if timeline is None else timeline.peak_nbytes,
        stats=dict(stats or {}),
    )


def _timeline(problem: Problem, schedule: Schedule) -> Timeline | None:
    """The referee's simulation, or None if the schedule is not valid for this problem."""
    if problem.links is None and any(isinstance(step, Start) for step in schedule.steps):
        return None
    try:
        timeline = simulate(problem.graph, schedule, links=problem.links)
    except InvalidSchedule:
        return None
    host_nbytes = problem.host_budget_nbytes
    fits_host = host_nbytes is None or timeline.host_peak_nbytes <= host_nbytes
    return timeline if timeline.peak_nbytes <= problem.budget_nbytes and fits_host else None
