"""The page of a diagnosis: four tables, and advice that follows from their figures."""

import math
from collections.abc import Sequence
from itertools import chain

import attrs

from remat_facade.planning.planner import SOLVE_SHARE
from remat_facade.report.doctor import Diagnosis, TimePart
from remat_facade.report.held import WORKSPACE, held_by_layer, makers, repeats_by_layer
from remat_facade.report.table import Table, saved_by_time
from remat_graph import Graph, Role, format_nbytes, format_seconds
from remat_graph.budget import gradient_nbytes
from remat_graph.units import format_change

MOST_LAYERS, MOST_COSTLY, MOST_VALUES, MOST_PARTS = 8, 3, 5, 10
"""Rows: of layers, of those that are there for what they recompute, of values and of parts."""

MUCH, LESS, CLOSED = 0.3, 0.95, 0.0005
"""Advice is given from this share of the time on, to this share of the floor, and for this gap at most."""

_KINDS = {
    Role.GRAD: "gradient",
    Role.OUTPUT: "output",
    Role.DROPPED: "dropped output",
    Role.TANGENT: "tangent",
    Role.PARAM: "parameter",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.RNG: "generator state",
    Role.BUFFER: "buffer",
}

_PARTS = {
    "greedy": "greedy eviction",
    "bound": "lower bounds",
    "cut": "plan of the bound's cut",
    "walk": "first annealing",
    "coarse": "coarse program",
    "interval_dp": "interval DP",
    "mincut": "cuts at the boundary",
    "minimize_peak": "smallest peak",
    "search": "annealing",
    "candidates": "families of ways",
    "switches": "annealing with ways",
    "families": "annealing of families",
}
"""What the parts of `auto` do, where their names do not say it."""


def doctor_tables(found: Diagnosis) -> tuple[Table, ...]:
    """The step, its memory by layer, what the floor holds, and the time of planning."""
    return step_table(found), memory_table(found), floor_table(found), time_table(found.parts, found.graph)


def step_table(found: Diagnosis) -> Table:
    """Sizes and times of the step, and what percentages these are."""
    graph, plan = found.graph, found.plan
    peak, fixed = plan.noremat_peak_nbytes, gradient_nbytes(graph)

    def size(name: str, nbytes: int) -> tuple[str, str, str, str]:
        budget = f"{(nbytes - fixed) / (peak - fixed):.1%}" if peak > fixed <= nbytes else ""
        return name, format_nbytes(nbytes), f"{nbytes / peak:.1%}" if peak else "", budget

    backward = sum(op.backward for op in graph.ops)
    kinds = f"{found.kinds} kinds"
    runs = len(plan.schedule.order)
    rows = (
        ("ops, of them in the backward", f"{len(graph.ops)}, {backward}", kinds, ""),
        size("peak of the unplanned step", peak),
        size("gradients", fixed),
        size("no schedule exists below", found.smallest.proven_nbytes),
        size("of that, where one op runs", found.floor.nbytes),
        size("smallest budget found", found.smallest.nbytes),
        size("budget that was given", found.asked_nbytes),
        size("peak of the plan", plan.peak_nbytes),
        ("time of the unplanned step", format_seconds(plan.noremat_step_s), "", ""),
        ("time with the plan", format_seconds(plan.time_s), f"{plan.overhead:+z.2%}", ""),
        (
            "lower bound of that time",
            format_seconds(plan.lower_bound_s),
            f"{plan.lower_bound_overhead:+z.2%}",
            "",
        ),
        ("ops run by the plan", f"{runs}", f"{runs / max(1, len(graph.ops)) - 1:+z.1%}", ""),
    )
    return Table(title=f"{graph.name}: the step", columns=("", "", "of unplanned", "as --budget"), rows=rows)


def memory_table(found: Diagnosis) -> Table:
    """Who holds the memory at the three moments that matter, and who recomputes, by layer."""
    moments = found.unplanned, found.planned, found.at_floor
    held = [held_by_layer(found.graph, moment) for moment in moments]
    repeats = repeats_by_layer(found.graph, found.plan.schedule)
    names = list(dict.fromkeys(chain(*held, repeats)))
    names.sort(key=lambda name: -max(each[name] for each in held))
    costly = sorted(repeats, key=lambda name: -repeats[name][1])[:MOST_COSTLY]
    first = list(dict.fromkeys((*names[: MOST_LAYERS - len(costly)], *costly, *names)))[:MOST_LAYERS]
    base_s = found.plan.noremat_time_s
    rows = []
    for group in (*([name] for name in names if name in first), [n for n in names if n not in first]):
        count = sum(repeats.get(name, (0, 0.0))[0] for name in group)
        seconds = sum(repeats.get(name, (0, 0.0))[1] for name in group)
        sizes = [sum(each[name] for name in group) for each in held]
        if not (count or any(sizes)):
            continue
        name = group[0] if len(group) == 1 else f"{len(group)} more"
        cost = format_change(seconds / base_s) if base_s else ""
        rows.append((name, *map(_size, sizes), f"{count}" if count else "", cost))
    rows.append(("all", *(format_nbytes(moment.nbytes) for moment in moments), "", ""))
    note = (
        f"unplanned: at its peak, in {moments[0].place}; plan: at its peak, in {moments[1].place}; "
        f"floor: what every schedule holds in {moments[2].place}; repeats: ops that the plan recomputes"
    )
    columns = ("held and recomputed by", "unplanned", "plan", "floor", "repeats", "cost")
    return Table(title="what binds memory, by layer", columns=columns, rows=tuple(rows), note=note)


def floor_table(found: Diagnosis) -> Table:
    """The largest values of the floor, and why each is live then."""
    graph, held = found.graph, found.at_floor
    op = next((op for op in found.bounding.ops if op.name == found.floor.op), None)
    made_by = makers(graph)
    sizes = sorted(((n, v) for v, n in held.values.items()), key=lambda pair: (-pair[0], pair[1]))
    rows = []
    for nbytes, v in sizes[:MOST_VALUES]:
        value, maker = graph.values[v], made_by.get(v)
        kind = _KINDS.get(value.role) or ("of the backward" if maker and maker.backward else "activation")
        why = "stays"
        if op is not None and v in op.first.inputs:
            why = "read"
        elif op is not None and v in op.first.outputs:
            why = "made"
        layer = (maker.layer if maker else "") or "-"
        rows.append((value.name, layer, kind, why, format_nbytes(nbytes), f"{nbytes / held.nbytes:.1%}"))
    if held.workspace_nbytes:
        share = f"{held.workspace_nbytes / held.nbytes:.1%}"
        rows.append((WORKSPACE, "", "", "", format_nbytes(held.workspace_nbytes), share))
    if rest := sizes[MOST_VALUES:]:
        nbytes = sum(n for n, _ in rest)
        rows.append((f"{len(rest)} more", "", "", "", format_nbytes(nbytes), f"{nbytes / held.nbytes:.1%}"))
    return Table(
        title=f"the floor: {found.floor.place}",
        columns=("value", "layer", "kind", "here", "size", "share"),
        rows=tuple(rows),
        note="read, made: by this op; stays: it is live whatever the order, because it stays to the end, or "
        "nothing can recompute it",
    )


def time_table(parts: Sequence[TimePart], graph: Graph) -> Table:
    """How long each part took, and what the plan and its bound were before and after it.

    Parts of one name that gained nothing are one row; if there are many rows, the short ones are summed up.
    """
    total_s = sum(part.seconds for part in parts)
    merged = _merged(parts)
    ranked = sorted(merged, key=lambda part: (not part.gained, -part.seconds))
    kept = ranked[:MOST_PARTS]
    rows = [
        (
            _PARTS.get(part.name, part.name),
            format_seconds(part.seconds),
            f"{part.seconds / total_s:.0%}" if total_s else "",
            _change(part.before_s, part.after_s, graph.time_s),
            _change(part.bound_before_s, part.bound_after_s, graph.time_s),
        )
        for part in merged
        if part in kept
    ]
    if rest := ranked[MOST_PARTS:]:
        seconds = sum(part.seconds for part in rest)
        rows.append((f"{len(rest)} more", format_seconds(seconds), f"{seconds / total_s:.0%}", "", ""))
    return Table(
        title=f"where {format_seconds(total_s)} of planning went",
        columns=("part", "time", "share", "plan", "lower bound"),
        rows=tuple(rows),
        note="plan, lower bound: extra time of a step, before and after the part; blank: unchanged",
    )


def _merged(parts: Sequence[TimePart]) -> list[TimePart]:
    """The parts in order; of one name, those that gained nothing are one, in the place of the first."""
    found: dict[object, TimePart] = {}
    for place, part in enumerate(parts):
        key = place if part.gained else part.name
        seconds = found[key].seconds + part.seconds if key in found else part.seconds
        found[key] = attrs.evolve(found.get(key, part), seconds=seconds)
    return list(found.values())


def advice(found: Diagnosis) -> list[str]:
    """What to change, as far as it follows from the figures; one line each."""
    return [*_about_the_budget(found), *_about_time(found)]


def _about_the_budget(found: Diagnosis) -> list[str]:
    asked, least, smallest = found.asked_nbytes, found.floor.nbytes, found.smallest.nbytes
    said = []
    if asked < found.smallest.proven_nbytes:
        said.append(f"no schedule fits {format_nbytes(asked)}, with proof: {_INSTEAD}")
    elif asked < smallest:
        more = "; a longer --time-limit may find one" if found.smallest.cut_short else ""
        said.append(
            f"no schedule is known for {format_nbytes(asked)}, and none is excluded: {_INSTEAD}{more}"
        )
    if not found.searched:
        said.append(f"{found.plan.solver} found no schedule in this budget: {_INSTEAD}; more time may help")
    for option, nbytes in found.floors_with.items():
        if nbytes < LESS * least:
            said.append(
                f"{option} lowers the floor from {format_nbytes(least)} to {format_nbytes(nbytes)}, "
                f"if your loop {_LOOPS[option]}"
            )
    return said


_INSTEAD = "the plan above is for the smallest budget found"

_LOOPS = {
    'gradients="present"': "finds a .grad for every parameter (accumulation)",
    'outputs="dropped"': "drops the outputs before the backward",
}


def _about_time(found: Diagnosis) -> list[str]:
    plan, said = found.plan, []
    total_s = sum(part.seconds for part in found.parts)
    measuring_s = sum(part.seconds for part in found.parts if part.name == "measuring")
    if found.measured and found.measured[0] and measuring_s > MUCH * total_s:
        said.append(
            f"{measuring_s / total_s:.0%} of the time went to measuring {found.measured[0]} of "
            f"{found.measured[1]} kinds of ops: their costs are kept for the next run"
        )
    if not found.searched:
        return said
    if plan.gap <= CLOSED and plan.overhead > 0:
        said.append(f"the plan is within {CLOSED:.2%} of its lower bound: only a larger budget helps")
    elif plan.deadline_hit and (gap := saved_by_time(plan)):
        said.append(f"the time limit ended the search: a longer --time-limit may save up to {gap}")
    solving = [part for part in found.parts if part.bound_after_s is not None]
    solving_s = sum(part.seconds for part in solving)
    idle_s = sum(part.seconds for part in _after_the_last_gain(solving, CLOSED * plan.noremat_time_s))
    limit_s = math.ceil((solving_s - idle_s) / SOLVE_SHARE) or 1
    if idle_s > MUCH * total_s and limit_s * SOLVE_SHARE < solving_s:
        said.append(
            f"the last {format_seconds(idle_s)} gained below {CLOSED:.2%}: --time-limit {limit_s} ends before"
        )
    return said


def _after_the_last_gain(parts: Sequence[TimePart], least_s: float) -> list[TimePart]:
    """The parts after the last that made the plan or the bound better by `least_s`."""
    last = max((i for i, part in enumerate(parts) if part.gain_s >= least_s), default=-1)
    return list(parts[last + 1 :])


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else ""


def _change(before_s: float | None, after_s: float | None, base_s: float) -> str:
    """How a time of a step changed, relative to that of the unplanned step."""
    if before_s == after_s:
        return ""
    known = [s for s in (before_s, after_s) if s is not None]
    shown = (f"{s / base_s - 1:+z.2%}" if base_s else format_seconds(s) for s in known)
    return " to ".join(dict.fromkeys(shown))  # one figure, if they differ below its last digit
