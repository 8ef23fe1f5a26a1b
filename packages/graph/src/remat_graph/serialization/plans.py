"""Plans as versioned JSON; reading runs no code and trusts nothing.

A file is an object with ``format`` and ``version``; a file of a newer version is refused by saying so. With a
graph, a plan that is read is judged again by the referee.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from remat_graph.errors import BadFile, FalseBound, ForeignPlan, InvalidSchedule, OverBudget
from remat_graph.fingerprint import fingerprint
from remat_graph.ir import Graph
from remat_graph.links import Links
from remat_graph.plan import MOST_PERIODS, Plan
from remat_graph.serialization.fields import ANY, VERSION, AnyPath, keys_of
from remat_graph.serialization.json_reader import Reader, read_json, write_json
from remat_graph.serialization.schedules import read_schedule, schedule_to_data

PLAN_FORMAT = "remat-plan"


def save_plan(plan: Plan, path: AnyPath) -> None:
    """Write a plan; an existing file is replaced in one go."""
    write_json(plan_to_data(plan), path)


def load_plan(path: AnyPath, graph: Graph | None = None) -> Plan:
    """Read a plan; with a graph, check that the plan is for it and ask the referee again.

    A plan outlives the measurement it was made with. With a graph, peaks and times are therefore the
    referee's on that graph, and where its times differ the lower bound, proved for others, is dropped to 0.

    Args:
        path: the file.
        graph: what it is to be used on.

    Raises:
        BadFile: missing, corrupt, cut off, newer, of another kind, or its schedule cannot be carried out on
            the graph.
        ForeignPlan: it was made for another graph.
        OverBudget: on this graph it peaks above the budget it was made for.
    """
    return plan_from_data(read_json(path), graph=graph, source=os.fspath(path))


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """A plan as JSON data."""
    figures = {field: getattr(plan, field) for field in _PLAN_FIELDS}
    figures |= {"solver_stats": dict(plan.solver_stats), "versions": dict(plan.versions)}
    if plan.on_host or plan.host_peak_nbytes:  # else as readers know it that know no host
        figures |= {"on_host": list(plan.on_host), "host_peak_nbytes": plan.host_peak_nbytes}
    if plan.links is not None:
        figures["links"] = {n: rate for n, rate in attrs.asdict(plan.links).items() if rate is not None}
    if plan.periods != 1:
        figures["periods"] = plan.periods
    return {
        "format": PLAN_FORMAT,
        "version": VERSION,
        **figures,
        "schedule": schedule_to_data(plan.schedule),
    }


def plan_from_data(data: Any, *, graph: Graph | None = None, source: str = "plan data") -> Plan:
    """The plan of JSON data; arguments and errors as for `load_plan`."""
    reader = Reader(data, source)
    reader.header(PLAN_FORMAT, VERSION, "plan")
    reader.known(keys_of(Plan) - {"notes"} | {"format", "version"})
    if graph is not None and (found := reader.get("fingerprint").text()) != (wanted := fingerprint(graph)):
        name = reader.get("graph_name").text()
        problem = (
            f"is a plan for another graph, {name or 'unnamed'} ({found[:15]}...), not for "
            f"{graph.name or 'this one'} ({wanted[:15]}...): solve again, or load it on "
            "the model, sample and mode it was made with"
        )
        raise ForeignPlan(path=source, problem=problem)
    try:
        plan = _read_plan(reader, graph)
    except OverBudget as error:
        reader.fail(f"its predicted peak is above its own budget: {error}")
    except RecursionError:
        reader.fail("its statistics are nested too deeply to be one of our plans")
    return plan if graph is None else _rejudged(plan, graph, source)


def _read_plan(reader: Reader, graph: Graph | None) -> Plan:
    figures: dict[str, Any] = {}
    for field in attrs.fields(Plan):
        # The annotation says how to read a figure; what is not a plain one is read below.
        if (read := _READERS.get(field.type)) is not None and field.name not in _OF_THE_HOST:
            figures[field.name] = read(reader.get(field.name))
    if "on_host" in reader.mapping():
        values = ANY if graph is None else len(graph.values)
        figures["on_host"] = reader.get("on_host").indices(values, "value")
        figures["host_peak_nbytes"] = reader.get("host_peak_nbytes").size()
    figures["links"] = reader.maybe("links", _read_links)
    figures["periods"] = reader.get_or("periods", Reader.size, 1)
    if not 1 <= figures["periods"] <= MOST_PERIODS:
        wanted = f"a whole number from 1 to {MOST_PERIODS} was wanted"
        reader.get("periods").fail(f"{wanted}, but it is {figures['periods']:,}")
    versions = reader.get("versions")
    return Plan(
        **figures,
        schedule=read_schedule(reader.get("schedule"), graph),
        solver_stats=reader.get("solver_stats").mapping(),
        versions={package: versions.get(package).text() for package in versions.mapping()},
    )


def _read_links(reader: Reader) -> Links:
    reader.known(keys_of(Links))
    return Links(**{name: reader.get(name).rate() for name in reader.mapping()})


_READERS: Mapping[Any, Callable[[Reader], Any]] = {
    int: Reader.size,
    float: Reader.seconds,
    str: Reader.text,
    bool: Reader.flag,
}


def _rejudged(plan: Plan, graph: Graph, source: str) -> Plan:
    same_times = abs(plan.noremat_time_s - graph.time_s) <= 1e-9 * graph.time_s
    try:
        judged = Plan.from_schedule(
            graph,
            plan.schedule,
            budget_nbytes=plan.budget_nbytes,
            lower_bound_s=plan.lower_bound_s if same_times else 0.0,
            solver=plan.solver,
            solver_stats=plan.solver_stats,
            versions=plan.versions,
            platform=plan.platform,
            deadline_hit=plan.deadline_hit,
            links=plan.links,
            periods=plan.periods,
        )
    except InvalidSchedule as error:
        raise BadFile(path=source, problem=f"its schedule cannot be carried out: {error}") from error
    except FalseBound as error:
        claimed = (
            f"its lower bound of {error.lower_bound_s:g} s is above the {error.time_s:g} s that it takes"
        )
        raise BadFile(path=source, problem=f"{claimed}: solve again") from error
    if not graph.updates:
        return judged
    # What gradients that are there already take beside it depends on no measurement.
    names = ("peak_nbytes", "live_peak_nbytes", "host_peak_nbytes")
    return attrs.evolve(judged, **{name: max(getattr(judged, name), getattr(plan, name)) for name in names})


_OF_THE_HOST = ("on_host", "host_peak_nbytes", "links", "periods")

_PLAN_FIELDS = tuple(
    field.name
    for field in attrs.fields(Plan)
    if field.name not in {"schedule", "solver_stats", "versions", "notes", *_OF_THE_HOST}
)
