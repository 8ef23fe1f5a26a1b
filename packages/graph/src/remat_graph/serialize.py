"""Graphs, plans and orders as versioned JSON; reading runs no code and trusts nothing.

A graph or plan file is an object with ``format`` and ``version``; a file of a newer version is refused by
saying so. What has its default is left out. `load_graph` reads the corpus format too (see `corpus`). An order
is a bare list of op indices, repeats included, which is what the corpus' judge reads.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from remat_graph.corpus import is_corpus, read_corpus
from remat_graph.errors import BadFile, FalseBound, ForeignPlan, InvalidGraph, InvalidSchedule, OverBudget
from remat_graph.fingerprint import fingerprint
from remat_graph.ir import Graph, Home, Implementation, Op, Role, Update, Value
from remat_graph.jsonfile import Reader, read_json, write_json
from remat_graph.links import Links
from remat_graph.plan import MOST_PERIODS, Plan
from remat_graph.schedule import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_graph.verify import verify

GRAPH_FORMAT = "remat-graph"
PLAN_FORMAT = "remat-plan"
VERSION = 1

_Path = str | os.PathLike[str]
_ANY = 2**63  # no graph at hand: indices are only known not to be negative


# -- graphs


def save_graph(graph: Graph, path: _Path) -> None:
    """Write a graph; an existing file is replaced in one go."""
    write_json(graph_to_data(graph), path)


def load_graph(path: _Path) -> Graph:
    """Read a graph, ours or one of the corpus, and check it.

    Raises:
        BadFile: missing, corrupt, cut off, newer, of another kind, or not a valid graph.
    """
    return graph_from_data(read_json(path), source=os.fspath(path))


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """A graph as JSON data."""
    return {
        "format": GRAPH_FORMAT,
        "version": VERSION,
        "name": graph.name,
        "rounding_nbytes": graph.rounding_nbytes,
        "conditions": [list(pair) for pair in graph.conditions],
        "values": [_sparse(value) for value in graph.values],
        "ops": [
            _sparse(op) | {"implementations": [_sparse(i) for i in op.implementations]} for op in graph.ops
        ],
        "updates": [_sparse(update) for update in graph.updates],
    }


def graph_from_data(data: Any, *, source: str = "graph data") -> Graph:
    """The graph of JSON data, checked.

    Args:
        data: what `graph_to_data` gave, or a corpus graph.
        source: what to call it in errors.

    Raises:
        BadFile: it is something else, newer, or not a valid graph.
    """
    reader = Reader(data, source)
    if is_corpus(data):
        graph = read_corpus(reader)
    else:
        reader.header(GRAPH_FORMAT, VERSION, "graph")
        graph = _read_graph(reader)
    try:
        verify(graph)
    except InvalidGraph as error:
        raise BadFile(path=source, problem=str(error)) from error
    return graph


def _read_graph(reader: Reader) -> Graph:
    reader.known(_keys(Graph) | {"format", "version"})
    value_readers = reader.get("values").items()
    count = len(value_readers)
    rounding = reader.get("rounding_nbytes")
    if rounding.size() < 1:
        rounding.fail("must be at least 1")
    return Graph(
        name=reader.get("name").text(),
        values=tuple(_read_value(item, count) for item in value_readers),
        ops=tuple(_read_op(item, count) for item in reader.get("ops").items()),
        updates=tuple(_read_update(item, count) for item in reader.get("updates").items()),
        rounding_nbytes=rounding.size(),
        conditions=tuple(_read_pair(item) for item in reader.get("conditions").items()),
    )


def _read_pair(reader: Reader) -> tuple[str, str]:
    items = reader.items()
    if len(items) != 2:
        reader.fail("a pair of texts was wanted")
    return items[0].text(), items[1].text()


def _read_value(reader: Reader, count: int) -> Value:
    reader.known(_keys(Value))

    def value(found: Reader) -> int:
        return found.index(count, "value")

    return Value(
        name=reader.get("name").text(),
        nbytes=reader.get("nbytes").nbytes(),
        role=reader.get_or("role", lambda r: r.choice(Role), Role.ACTIVATION),
        external=reader.get_or("external", Reader.flag, False),
        of=reader.maybe("of", value),
        replaces=reader.maybe("replaces", value),
        chunk_of=reader.maybe("chunk_of", Reader.text),
        home=reader.maybe("home", lambda r: r.choice(Home)),
    )


def _read_op(reader: Reader, count: int) -> Op:
    reader.known(_keys(Op))
    implementations = reader.get("implementations").items()
    if not implementations:
        reader.fail("it has no implementation")

    def rerun(found: Reader) -> int | None:
        return None if found.data is None else found.index(len(implementations), "implementation")

    return Op(
        name=reader.get("name").text(),
        target=reader.get("target").text(),
        backward=reader.get_or("backward", Reader.flag, False),
        key=reader.get_or("key", Reader.text, ""),
        rerun=reader.maybe("rerun", rerun) if "rerun" in reader.mapping() else 0,
        implementations=tuple(_read_implementation(item, count) for item in implementations),
    )


def _read_implementation(reader: Reader, count: int) -> Implementation:
    reader.known(_keys(Implementation))

    def pairs(found: Reader) -> tuple[tuple[int, int], ...]:
        read = []
        for item in found.items():
            pair = item.indices(count, "value")
            if len(pair) != 2:
                item.fail("a pair of values was wanted")
            read.append((pair[0], pair[1]))
        return tuple(read)

    return Implementation(
        inputs=reader.get("inputs").indices(count, "value"),
        outputs=reader.get("outputs").indices(count, "value"),
        time_s=reader.get_or("time_s", Reader.seconds, 0.0),
        workspace_nbytes=reader.get_or("workspace_nbytes", Reader.nbytes, 0),
        reuses=reader.get_or("reuses", pairs, ()),
    )


def _read_update(reader: Reader, count: int) -> Update:
    reader.known(_keys(Update))
    return Update(
        param=reader.get("param").index(count, "value"),
        grad=reader.get("grad").index(count, "value"),
        states=reader.get_or("states", lambda r: r.indices(count, "value"), ()),
        device_time_s=reader.get_or("device_time_s", Reader.seconds, 0.0),
        cpu_time_s=reader.get_or("cpu_time_s", Reader.seconds, 0.0),
        workspace_nbytes=reader.get_or("workspace_nbytes", Reader.nbytes, 0),
    )


# -- schedules and plans


def schedule_to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON data: each step a list, its word first."""
    data = {"boundary": schedule.boundary, "steps": [_step_to_data(step) for step in schedule.steps]}
    return data if schedule.end is None else {**data, "end": schedule.end}


def schedule_from_data(data: Any, *, graph: Graph | None = None, source: str = "schedule data") -> Schedule:
    """The schedule of JSON data; whether it can be carried out is the referee's to say.

    Args:
        data: what `schedule_to_data` gave.
        graph: if given, indices must lie within it.
        source: what to call it in errors.

    Raises:
        BadFile: it is something else, or refers to what is not there.
    """
    return _read_schedule(Reader(data, source), graph)


def save_plan(plan: Plan, path: _Path) -> None:
    """Write a plan; an existing file is replaced in one go."""
    write_json(plan_to_data(plan), path)


def load_plan(path: _Path, graph: Graph | None = None) -> Plan:
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
    reader.known(_keys(Plan) - {"notes"} | {"format", "version"})
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
        values = _ANY if graph is None else len(graph.values)
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
        schedule=_read_schedule(reader.get("schedule"), graph),
        solver_stats=reader.get("solver_stats").mapping(),
        versions={package: versions.get(package).text() for package in versions.mapping()},
    )


def _read_links(reader: Reader) -> Links:
    reader.known(_keys(Links))
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


def _step_to_data(step: Step) -> list[Any]:
    match step:
        case Compute(op, implementation):
            return ["compute", op, implementation] if implementation else ["compute", op]
        case Free(value):
            return ["free", value]
        case Deliver(value):
            return ["deliver", value]
        case Start(transfer):
            return ["start", transfer.value, transfer.lane.value]
        case Wait(transfer):
            return ["wait", transfer.value, transfer.lane.value]
        case FreeHost(value):
            return ["free_host", value]
        case OptimizerStep(value, lane):
            return ["optimizer_step", value, lane.value]


def _read_schedule(reader: Reader, graph: Graph | None) -> Schedule:
    reader.known(frozenset({"boundary", "steps", "end"}))
    items = reader.get("steps").items()
    steps = tuple(_read_step(item, graph) for item in items)
    end = reader.maybe("end", lambda r: r.index(len(items) + 1, "end"))
    return Schedule(steps, reader.get("boundary").index(len(items) + 1, "boundary"), end)


def _read_step(reader: Reader, graph: Graph | None) -> Step:
    ops, values = (_ANY, _ANY) if graph is None else (len(graph.ops), len(graph.values))
    items = reader.items()
    word = items[0].text() if items else ""
    rest = items[1:]
    if len(rest) not in _STEP_SIZES.get(word, ()):
        reader.fail(f"is no step: {str(reader.data)[:60]}")
    match word:
        case "compute":
            op = rest[0].index(ops, "op")
            count = _ANY if graph is None else len(graph.ops[op].implementations)
            return Compute(op, rest[1].index(count, "implementation") if len(rest) == 2 else 0)
        case "free":
            return Free(rest[0].index(values, "value"))
        case "deliver":
            return Deliver(rest[0].index(values, "value"))
        case "free_host":
            return FreeHost(rest[0].index(values, "value"))
    value, lane = rest[0].index(values, "value"), rest[1].choice(Lane)
    try:
        if word == "optimizer_step":
            return OptimizerStep(value, lane)
        return Start(Transfer(value, lane)) if word == "start" else Wait(Transfer(value, lane))
    except ValueError:
        reader.fail(f"{word} cannot be on lane {lane}")


_STEP_SIZES: Mapping[str, tuple[int, ...]] = {
    "compute": (1, 2),
    "free": (1,),
    "deliver": (1,),
    "free_host": (1,),
    "start": (2,),
    "wait": (2,),
    "optimizer_step": (2,),
}


# -- orders


def save_order(order: Iterable[int], path: _Path) -> None:
    """Write op indices in running order, repeats included."""
    write_json([int(op) for op in order], path)


def load_order(path: _Path, graph: Graph | None = None) -> tuple[int, ...]:
    """Read op indices; with a graph, check that it has those ops.

    Raises:
        BadFile: missing, corrupt, or not a list of op indices.
    """
    reader = Reader(read_json(path), os.fspath(path))
    if not isinstance(reader.data, list):
        reader.fail("an order is a JSON list of op indices; this is something else")
    return reader.indices(_ANY if graph is None else len(graph.ops), "op")


# -- shared


def _keys(cls: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in attrs.fields(cls))


_OF_THE_HOST = ("on_host", "host_peak_nbytes", "links", "periods")

_PLAN_FIELDS = tuple(
    field.name
    for field in attrs.fields(Plan)
    if field.name not in {"schedule", "solver_stats", "versions", "notes", *_OF_THE_HOST}
)


def _sparse(thing: Value | Op | Implementation | Update) -> dict[str, Any]:
    """What differs from its default; nested implementations are the caller's."""
    data: dict[str, Any] = {}
    for field in attrs.fields(type(thing)):
        content = getattr(thing, field.name)
        if field.name != "implementations" and content != field.default:
            data[field.name] = _plain(content)
    return data


def _plain(content: Any) -> Any:
    if isinstance(content, tuple):
        return [_plain(item) for item in content]
    return content
