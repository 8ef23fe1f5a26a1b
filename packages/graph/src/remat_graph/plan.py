"""Combine a schedule with its simulated bytes and times, its origin and its lower bound: a plan."""

import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from operator import index
from typing import Any

import attrs

from remat_graph.budget import gradient_nbytes
from remat_graph.errors import FalseBound, OverBudget
from remat_graph.fingerprint import fingerprint
from remat_graph.ir import Graph, Placement, as_indices
from remat_graph.layers.recomputed import LayerGroup, layer_groups
from remat_graph.layers.rounding import RoundingGroup, rounding_groups
from remat_graph.layers.summary import recomputed_line, rounding_lines, ways_line
from remat_graph.layers.ways import WayGroup, way_groups
from remat_graph.links import Links
from remat_graph.schedule import Lane, Schedule
from remat_graph.simulator.simulate import simulate
from remat_graph.simulator.timeline import Grads
from remat_graph.switches.rounding import rounding_runs
from remat_graph.switches.specialize import switches_on
from remat_graph.training import persistent, with_placement
from remat_graph.units import format_change, format_nbytes, format_seconds

MOST_PERIODS = 16
"""Most training steps over which a plan may be timed: the simulation plays each of them."""

_BOUND_SLACK = 1e-6  # relative; linear programs are solved to about this


def _finite(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{attribute.name} is {value}, but must be finite and at least 0")


def _signed(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{attribute.name} is {value}, but must be finite")


def _copy_stats(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    return {str(key): _plain(value) for key, value in stats.items()}


def _plain(value: Any) -> Any:
    """The value as JSON reads it back: lists for tuples, Python numbers for numpy's, None for NaN."""
    if isinstance(value, Mapping):
        return _copy_stats(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # not by its class: numpy would be loaded with every plan
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _copy_versions(versions: Mapping[str, str]) -> Mapping[str, str]:
    return dict(versions)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str, names))


def _name_pairs(pairs: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in pairs)


def _layers(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    return tuple(groups)


def _ways(groups: Iterable[WayGroup]) -> tuple[WayGroup, ...]:
    return tuple(groups)


def _rounding_layers(groups: Iterable[RoundingGroup]) -> tuple[RoundingGroup, ...]:
    return tuple(groups)


def _switched_s(graph: Graph, schedule: Schedule) -> float:
    """Seconds of all first runs beyond those of the unplanned step."""
    if not graph.switches:
        return 0.0
    ran: dict[int, int] = {}
    for step in schedule.computes():
        ran.setdefault(step.op, step.implementation)
    return sum(
        graph.ops[op].implementations[run].time_s - graph.ops[op].first.time_s for op, run in ran.items()
    )


_size = [attrs.validators.instance_of(int), attrs.validators.ge(0)]
_count = [attrs.validators.instance_of(int), attrs.validators.ge(1), attrs.validators.le(MOST_PERIODS)]


@attrs.frozen(kw_only=True)
class Plan:
    """A schedule, its predicted peaks and times, and how far its time may be from the best.

    Attributes:
        fingerprint: of the graph it was made for.
        graph_name: for people.
        schedule: the steps.
        budget_nbytes: upper limit of `peak_nbytes`.
        peak_nbytes: predicted device peak as the allocator sees it.
        live_peak_nbytes: predicted device peak of tensor storages alone.
        noremat_peak_nbytes: the peak of the unplanned step.
        gradient_nbytes: bytes of gradients, held when the step ends.
        time_s: predicted seconds of the step: of its lanes, or of issuing its ops if that takes longer.
        noremat_time_s: seconds of running every op once.
        recomputed_s: seconds of repeated runs.
        lower_bound_s: compute seconds, first runs included, that every schedule within the budget needs.
        solver: name of the solver that made the schedule.
        solver_stats: statistics that the solver reports, JSON-able.
        versions: of the packages that made the plan, by name.
        platform: where the times come from.
        deadline_hit: whether a wall-clock deadline stopped the solver, so that another run may differ.
        notes: lines for the summary; neither compared nor saved.
        host_peak_nbytes: predicted peak of bytes on the host.
        on_host: indices of the values that are placed on the host.
        links: bandwidths that its times assume; None if nothing moves.
        periods: number of consecutive training steps that were timed, at most `MOST_PERIODS`.
        issue_s: seconds in which the host issues the ops of the step to the device.
        noremat_issue_s: the same of every op once.
        switched: names of the switches that are on, sorted.
        switched_s: seconds that they add to the first runs; negative if those are faster.
        grads: the state of ``.grad`` for which the peaks are predicted.
        rounding: ops that run in a way whose results may differ from the original's within rounding, and the
            family of the way. Empty unless such ways were asked for.
        layers: what is recomputed and kept, by groups of layers, if the graph knows the layers of its ops.
        ways: where ops run in another way, by groups of layers.
        rounding_layers: the ops of `rounding` by groups of layers, if the graph knows the layers of its ops.

    `recomputed_s`, `lower_bound_s`, the overheads and the gap are of the ops' own time, without issuing.
    """

    fingerprint: str
    graph_name: str
    schedule: Schedule
    budget_nbytes: int = attrs.field(validator=_size)
    peak_nbytes: int = attrs.field(validator=_size)
    live_peak_nbytes: int = attrs.field(validator=_size)
    noremat_peak_nbytes: int = attrs.field(validator=_size)
    gradient_nbytes: int = attrs.field(validator=_size)
    time_s: float = attrs.field(converter=float, validator=_finite)
    noremat_time_s: float = attrs.field(converter=float, validator=_finite)
    recomputed_s: float = attrs.field(converter=float, validator=_finite)
    lower_bound_s: float = attrs.field(converter=float, validator=_finite)
    solver: str
    solver_stats: Mapping[str, Any] = attrs.field(factory=dict, converter=_copy_stats)
    versions: Mapping[str, str] = attrs.field(factory=dict, converter=_copy_versions)
    platform: str = ""
    deadline_hit: bool = False
    notes: tuple[str, ...] = attrs.field(default=(), eq=False)
    host_peak_nbytes: int = attrs.field(default=0, validator=_size)
    on_host: tuple[int, ...] = attrs.field(default=(), converter=as_indices)
    links: Links | None = None
    periods: int = attrs.field(default=1, validator=_count)
    issue_s: float = attrs.field(default=0.0, converter=float, validator=_finite)
    noremat_issue_s: float = attrs.field(default=0.0, converter=float, validator=_finite)
    switched: tuple[str, ...] = attrs.field(default=(), converter=_names)
    switched_s: float = attrs.field(default=0.0, converter=float, validator=_signed)
    grads: Grads = attrs.field(default=Grads.NEW, converter=Grads)
    rounding: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_name_pairs)
    layers: tuple[LayerGroup, ...] = attrs.field(default=(), converter=_layers)
    ways: tuple[WayGroup, ...] = attrs.field(default=(), converter=_ways)
    rounding_layers: tuple[RoundingGroup, ...] = attrs.field(default=(), converter=_rounding_layers)

    def __attrs_post_init__(self) -> None:
        if self.peak_nbytes > self.budget_nbytes:
            raise OverBudget(
                solver=self.solver, peak_nbytes=self.peak_nbytes, budget_nbytes=self.budget_nbytes
            )

    @classmethod
    def from_schedule(
        cls,
        graph: Graph,
        schedule: Schedule,
        *,
        budget_nbytes: int,
        lower_bound_s: float,
        solver: str,
        solver_stats: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        platform: str = "",
        deadline_hit: bool = False,
        links: Links | None = None,
        periods: int = 1,
        grads: Grads = Grads.NEW,
    ) -> "Plan":
        """Make the plan of a schedule; `simulate` gives its peaks and times.

        Args:
            graph: the graph.
            schedule: the steps.
            budget_nbytes: upper limit of the peak.
            lower_bound_s: the bound that the solver proved; below `graph.time_s` only where an op has a
                faster implementation.
            solver: name of the solver.
            solver_stats: statistics, JSON-able.
            versions: of the packages that matter, by name.
            platform: where the graph's times come from.
            deadline_hit: whether a wall-clock deadline stopped the solver.
            links: bandwidths, if the schedule moves values.
            periods: number of consecutive training steps; see `simulate`.
            grads: the state of ``.grad``.

        Raises:
            InvalidSchedule: the schedule cannot be carried out.
            OverBudget: the schedule peaks above the budget. A plan above its budget is never made.
            FalseBound: the lower bound is above the compute time of the schedule.
        """
        timeline = simulate(graph, schedule, grads=grads, links=links, periods=periods)
        compute_s = timeline.lane_s[Lane.COMPUTE]
        if lower_bound_s > compute_s * (1 + _BOUND_SLACK):
            raise FalseBound(solver=solver, lower_bound_s=lower_bound_s, time_s=compute_s)
        usual = Schedule.unplanned(graph)
        rounding = rounding_runs(graph, schedule)
        unplanned = simulate(with_placement(graph, ()), usual)
        return cls(
            fingerprint=fingerprint(graph),
            graph_name=graph.name,
            schedule=schedule,
            budget_nbytes=index(budget_nbytes),
            peak_nbytes=timeline.peak_nbytes,
            live_peak_nbytes=timeline.live_peak_nbytes,
            noremat_peak_nbytes=unplanned.peak_nbytes,
            gradient_nbytes=gradient_nbytes(graph),
            time_s=max(timeline.time_s, timeline.issue_s),
            noremat_time_s=graph.time_s,
            recomputed_s=timeline.recomputed_s,
            lower_bound_s=min(lower_bound_s, compute_s),
            solver=solver,
            solver_stats=solver_stats or {},
            versions={"remat_graph": version("remat-graph")} | dict(versions or {}),
            platform=platform,
            deadline_hit=deadline_hit,
            host_peak_nbytes=timeline.host_peak_nbytes,
            on_host=persistent(graph, Placement.HOST),
            links=links,
            periods=periods,
            issue_s=timeline.issue_s,
            noremat_issue_s=graph.issue_s,
            switched=sorted(switches_on(graph, schedule)),
            switched_s=_switched_s(graph, schedule),
            grads=grads,
            rounding=rounding,
            layers=layer_groups(graph, schedule, usual),
            ways=way_groups(graph, schedule),
            rounding_layers=rounding_groups(graph, rounding),
        )

    @property
    def noremat_step_s(self) -> float:
        """Predicted seconds of the unplanned step, by the same rule as `time_s`."""
        return max(self.noremat_time_s, self.noremat_issue_s)

    @property
    def waits_for_host(self) -> float:
        """Share of the step in which the device waits for the host to issue ops; 0 unless that is longest."""
        if not self.issue_s or self.time_s > self.issue_s:
            return 0.0
        return max(0.0, 1.0 - (self.noremat_time_s + self.recomputed_s) / self.issue_s)

    @property
    def launch_note(self) -> str:
        """What a launch-bound plan says about itself, in one line; see `waits_for_host`."""
        return (
            f"launch-bound: the host issues ops for {format_seconds(self.issue_s)}, and the device waits "
            f"{self.waits_for_host:.0%} of the step; CUDA graphs or larger batches help, and percentages of "
            "recomputation are of the device's time"
        )

    @property
    def overhead(self) -> float:
        """Seconds beyond the unplanned step's as a ratio of those: 0.05 is 5 % more, for repeats and ways."""
        extra_s = self.recomputed_s + self.switched_s
        return extra_s / self.noremat_time_s if self.noremat_time_s else 0.0

    @property
    def recomputed_overhead(self) -> float:
        """The part of the overhead that repeats cost; the other part is that of other ways to run ops."""
        return self.recomputed_s / self.noremat_time_s if self.noremat_time_s else 0.0

    @property
    def lower_bound_overhead(self) -> float:
        """Lower bound of the overhead of every schedule within the budget, as a ratio."""
        if not self.noremat_time_s:
            return 0.0
        ratio = self.lower_bound_s / self.noremat_time_s - 1.0
        return ratio if self.overhead < 0 else max(0.0, ratio)

    @property
    def gap(self) -> float:
        """Overhead less its lower bound: at most this ratio can still be saved."""
        return max(0.0, self.overhead - self.lower_bound_overhead)

    def summary(self) -> str:
        """A few lines for people, without a newline at the end."""
        share = self.peak_nbytes / self.noremat_peak_nbytes if self.noremat_peak_nbytes else 1.0
        repeats = len(self.schedule.order) - len(set(self.schedule.order))
        ways = format_change(self.overhead - self.recomputed_overhead) if self.switched else ""
        ways_cost = f", other ways {ways}" if ways else ""
        ended_by = "Ctrl-C" if self.solver_stats.get("interrupted") else "the deadline"
        lines = [
            f"{self.graph_name or 'plan'}: peak {format_nbytes(self.peak_nbytes)} within a budget of "
            f"{format_nbytes(self.budget_nbytes)} ({share:.0%} of the unplanned "
            f"{format_nbytes(self.noremat_peak_nbytes)}; gradients {format_nbytes(self.gradient_nbytes)})",
            f"time {format_seconds(self.time_s)} ({self.overhead:+z.2%}): {repeats} repeated ops cost "
            f"{self.recomputed_overhead:+z.2%}{ways_cost}; "
            f"no plan is below {self.lower_bound_overhead:+z.2%}",
            f"by {self.solver}"
            + (f" on {self.platform}" if self.platform else "")
            + (f", cut short by {ended_by}" if self.deadline_hit else ""),
            *(["for steps that find a .grad for every parameter"] if self.grads is Grads.PRESENT else []),
            *recomputed_line(self.layers, self.noremat_time_s),
            *ways_line(self.ways, self.noremat_time_s),
            *rounding_lines(self.rounding, self.rounding_layers),
            *([self.launch_note] if self.waits_for_host else []),
            *self.notes,
        ]
        return "\n".join(lines)
