"""Read and write plans as versioned JSON; reading runs no code and checks everything.

A file is an object with ``format`` and ``version``; a newer version is refused with a message. With a graph,
the schedule of a plan that is read is simulated again.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from remat_graph.budget import noremat_peak_nbytes
from remat_graph.errors import BadFile, FalseBound, ForeignPlan, InvalidSchedule, OverBudget, shown
from remat_graph.fingerprint import fingerprint
from remat_graph.ir import Graph
from remat_graph.plan import MOST_PERIODS, Plan
from remat_graph.schedule import Schedule
from remat_graph.serialization.by_layer import group_to_data, read_layers, read_rounding, read_ways
from remat_graph.serialization.fields import ANY, VERSION, AnyPath, keys_of, links_to_data, read_links
from remat_graph.serialization.json_reader import Reader, read_json, write_json
from remat_graph.serialization.schedules import read_schedule, schedule_to_data
from remat_graph.simulator.timeline import Grads
from remat_graph.switches.relax import relaxed
from remat_graph.switches.rounding import without_rounding
from remat_graph.switches.specialize import specialize
from remat_graph.units import format_nbytes

PLAN_FORMAT = "remat-plan"


def save_plan(plan: Plan, path: AnyPath) -> None:
    """Write a plan; an existing file is replaced atomically.

    Raises:
        TypeError: it is no plan.
        CannotWrite: the file cannot be written.
    """
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise TypeError(f"plan: is of type {kind}; expected a Plan: give `.plan` of a planned module")
    write_json(plan_to_data(plan), path)


def load_plan(path: AnyPath, graph: Graph | None = None) -> Plan:
    """Read a plan; with a graph, check that the plan fits it and simulate the schedule again.

    A plan is used longer than the measurement it was made with. With a graph, peaks and times are therefore
    simulated on that graph. If its times differ, the lower bound, proved for other times, becomes 0.

    Raises:
        BadFile: the file is missing, corrupt, cut off, too new or of another kind, or its schedule cannot be
            carried out on the graph.
        ForeignPlan: the plan was made for another graph.
        OverBudget: on this graph the schedule peaks above the budget of the plan.
    """
    return plan_from_data(read_json(path), graph=graph, source=os.fspath(path))


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """A plan as JSON data."""
    figures = {field: getattr(plan, field) for field in _PLAN_FIELDS}
    figures |= {"solver_stats": dict(plan.solver_stats), "versions": dict(plan.versions)}
    if plan.on_host or plan.host_peak_nbytes:  # left out otherwise: older readers refuse these keys
        figures |= {"on_host": list(plan.on_host), "host_peak_nbytes": plan.host_peak_nbytes}
    if plan.links is not None:
        figures["links"] = links_to_data(plan.links)
    if plan.periods != 1:
        figures["periods"] = plan.periods
    if plan.issue_s or plan.noremat_issue_s:
        figures |= {name: getattr(plan, name) for name in _OF_ISSUING}
    if plan.switched:
        figures |= {"switched": list(plan.switched), "switched_s": plan.switched_s}
    if plan.grads is not Grads.NEW:
        figures["grads"] = plan.grads.value
    if plan.rounding:
        figures["rounding"] = [list(pair) for pair in plan.rounding]
    for name in _BY_LAYER:
        if groups := getattr(plan, name):
            figures[name] = [group_to_data(group) for group in groups]
    return {"format": PLAN_FORMAT, "version": VERSION, **figures, "schedule": schedule_to_data(plan.schedule)}


def plan_from_data(data: Any, *, graph: Graph | None = None, source: str = "plan data") -> Plan:
    """The plan of JSON data; arguments and errors as for `load_plan`."""
    reader = Reader(data, source)
    reader.header(PLAN_FORMAT, VERSION, "plan")
    reader.known(keys_of(Plan) - {"notes"} | {"format", "version"})
    made_on, restore = (None, None) if graph is None else _made_on(reader, graph)
    try:
        plan = _read_plan(reader, made_on)
    except OverBudget as error:
        reader.fail(f"its predicted peak is above its own budget: {error}")
    if graph is None:
        return plan
    if restore is not None:  # its bound holds with the other switches off
        least_s = min(plan.lower_bound_s, relaxed(graph).time_s)
        plan = attrs.evolve(plan, schedule=restore(plan.schedule), lower_bound_s=least_s)
    return _simulated_again(plan, graph, source)


def _made_on(reader: Reader, graph: Graph) -> tuple[Graph, Callable[[Schedule], Schedule] | None]:
    """The graph that the plan was made for, and how its schedule becomes one of `graph`, if they differ.

    It may have no switches, as in earlier versions, or only those that do not round.
    """
    found, wanted = reader.get("fingerprint").text(), fingerprint(graph)
    if found == wanted:
        return graph, None
    base = specialize(graph, ())
    if graph.switches and found == fingerprint(base.graph):
        return base.graph, base.restore
    exact = without_rounding(graph)
    if exact is not graph and found == fingerprint(exact):
        return exact, lambda schedule: schedule
    if "rounding" in reader.mapping() and exact is graph:
        families = Counter(family for _, family in _rounding(reader))
        named = ", ".join(f"{family} ({count})" for family, count in families.items())
        problem = (
            f"is a plan with ways that round differently, {named}, and this graph has only exact ones: "
            'plan again, or load it with ways="rounding"'
        )
        raise ForeignPlan(path=reader.source, problem=problem)
    name, peak_nbytes = reader.get("graph_name").text(), reader.get("noremat_peak_nbytes").size()
    problem = (
        f"is a plan for another graph, {name or 'unnamed'} ({found[:15]}..., {format_nbytes(peak_nbytes)} "
        f"without a plan), not for {graph.name or 'this one'} ({wanted[:15]}..., "
        f"{format_nbytes(noremat_peak_nbytes(graph))}): plan again, or load it with the model, the input "
        "shapes and dtypes, the mode, and the loss, outputs and ways that it was made with"
    )
    raise ForeignPlan(path=reader.source, problem=problem)


def _rounding(reader: Reader) -> list[tuple[str, str]]:
    pairs = [[name.text() for name in pair.items()] for pair in reader.get("rounding").items()]
    if any(len(pair) != 2 for pair in pairs):
        reader.get("rounding").fail("pairs of an op and a family were wanted")
    return [(op, family) for op, family in pairs]


def _read_plan(reader: Reader, graph: Graph | None) -> Plan:
    figures: dict[str, Any] = {}
    for field in attrs.fields(Plan):
        # The annotation determines the reader; fields of other types are read below.
        if (read := _READERS.get(field.type)) is not None and field.name not in _SOMETIMES:
            figures[field.name] = read(reader.get(field.name))
    if "on_host" in reader.mapping():
        values = ANY if graph is None else len(graph.values)
        figures["on_host"] = reader.get("on_host").indices(values, "value")
        figures["host_peak_nbytes"] = reader.get("host_peak_nbytes").size()
    figures |= {name: reader.get_or(name, Reader.seconds, 0.0) for name in _OF_ISSUING}
    figures["links"] = reader.get_or("links", read_links, None)
    figures["periods"] = reader.get_or("periods", Reader.size, 1)
    if not 1 <= figures["periods"] <= MOST_PERIODS:
        wanted = f"a whole number from 1 to {MOST_PERIODS} was wanted"
        reader.get("periods").fail(f"{wanted}, but it is {figures['periods']:,}")
    if "switched" in reader.mapping():
        figures["switched"] = [name.text() for name in reader.get("switched").items()]
        figures["switched_s"] = reader.get("switched_s").signed_seconds()
    figures["grads"] = reader.get_or("grads", _read_grads, Grads.NEW)
    figures["rounding"] = _rounding(reader) if "rounding" in reader.mapping() else ()
    versions = reader.get("versions")
    return Plan(
        **figures,
        layers=reader.get_or("layers", read_layers, ()),
        ways=reader.get_or("ways", read_ways, ()),
        rounding_layers=reader.get_or("rounding_layers", read_rounding, ()),
        schedule=read_schedule(reader.get("schedule"), graph),
        solver_stats=reader.get("solver_stats").free_form(),
        versions={package: versions.get(package).text() for package in versions.mapping()},
    )


def _read_grads(reader: Reader) -> Grads:
    text = reader.text()
    if text not in list(Grads):
        reader.fail(f"one of {', '.join(Grads)} was wanted, but it is {shown(text)}")
    return Grads(text)


_READERS: Mapping[Any, Callable[[Reader], Any]] = {
    int: Reader.size,
    float: Reader.seconds,
    str: Reader.text,
    bool: Reader.flag,
}


def _simulated_again(plan: Plan, graph: Graph, source: str) -> Plan:
    same_times = abs(plan.noremat_time_s - graph.time_s) <= 1e-9 * graph.time_s
    try:
        simulated = Plan.from_schedule(
            graph,
            plan.schedule,
            lower_bound_s=plan.lower_bound_s if same_times else 0.0,
            links=plan.links,
            periods=plan.periods,
            grads=plan.grads,
            **{name: getattr(plan, name) for name in _GIVEN},
        )
    except InvalidSchedule as error:
        raise BadFile(path=source, problem=f"its schedule cannot be carried out: {error}") from error
    except FalseBound as error:
        claimed = (
            f"its lower bound of {error.lower_bound_s:g} s is above its compute time of {error.time_s:g} s"
        )
        raise BadFile(path=source, problem=f"{claimed}: solve again") from error
    if not graph.updates:
        return simulated
    # The saved peaks may include accumulated gradients, which `from_schedule` does not count.
    names = ("peak_nbytes", "live_peak_nbytes", "host_peak_nbytes")
    return attrs.evolve(simulated, **{n: max(getattr(simulated, n), getattr(plan, n)) for n in names})


_GIVEN = ("budget_nbytes", "solver", "solver_stats", "versions", "platform", "deadline_hit")
_OF_THE_HOST = ("on_host", "host_peak_nbytes", "links", "periods")
_OF_ISSUING = ("issue_s", "noremat_issue_s")
_BY_LAYER = ("layers", "ways", "rounding_layers")
_SOMETIMES = (*_OF_THE_HOST, *_OF_ISSUING, *_BY_LAYER, "switched", "switched_s", "rounding", "grads")

_PLAN_FIELDS = tuple(
    field.name
    for field in attrs.fields(Plan)
    if field.name not in {"schedule", "solver_stats", "versions", "notes", *_SOMETIMES}
)
