"""Compiled flips of switches within a search; `local_search.joint` explains them.

A flip leaves the sequence: each run stays a first run or a repeat and gets another variant. So its cost is
summed in one pass over the runs, and the state is derived only for flips that are kept.
"""

from remat_solvers.kernels.derived import rebuild
from remat_solvers.kernels.incremental import NEVER, below, uniform
from remat_solvers.kernels.jit import njit_called as called
from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner

EVEN = 1e-9  # ratio of times that are equal but for the order of a sum


@inner
def mark(S, op, row, in_force):  # type: ignore[no-untyped-def]
    """Mark what a variant of an op makes, if it is `in_force`; else remove the marks."""
    for variant in range(row, row + 2):
        run = S.var[variant]
        for k in range(run.out_ptr, run.out_end):
            value = S.val[S.idx[k]]
            value.recomputable = run.recomputes if in_force else 0
            value.producer = op if in_force else -1


@called
def turn(S, s, on):  # type: ignore[no-untyped-def]
    """Turn one switch on or off."""
    switch = S.switches[s]
    if switch.on == on:
        return
    switch.on = on
    for k in range(switch.change_ptr, switch.change_end):
        mark(S, S.changes[k].op, S.ops[S.changes[k].op].now, False)
    for k in range(switch.change_ptr, switch.change_end):
        change = S.changes[k]
        row = change.row if on else change.off
        S.ops[change.op].now = row
        mark(S, change.op, row, True)


@inner
def turn_on(S, s):  # type: ignore[no-untyped-def]
    """Turn a switch on, and those off that it conflicts with."""
    switch = S.switches[s]
    for k in range(switch.conflict_ptr, switch.conflict_end):
        turn(S, S.conflicts[k], 0)
    turn(S, s, 1)


@njit
def set_switches(S, wanted):  # type: ignore[no-untyped-def]
    """Turn on exactly these switches, which do not conflict."""
    for s in range(S.switches.shape[0]):
        if not wanted[s]:
            turn(S, s, 0)
    for s in range(S.switches.shape[0]):
        if wanted[s]:
            turn(S, s, 1)


@called
def flip(S):  # type: ignore[no-untyped-def]
    """Flip one switch, or neighbours of a family to one side; the state is still that of before."""
    family = below(S, S.families.shape[0] - 1)
    start, stop = S.families[family], S.families[family + 1]
    first = start + below(S, stop - start)
    last = first + 1
    if uniform(S) < 0.5:
        last = first + 1 + below(S, stop - first)
        if uniform(S) < 0.2:
            first, last = start, stop
    on = 1 - S.switches[first].on
    remember(S)
    for s in range(first, last):
        if on:
            turn_on(S, s)
        else:
            turn(S, s, 0)


@inner
def remember(S):  # type: ignore[no-untyped-def]
    """Note which switches are on, for `flip_back`."""
    for s in range(S.switches.shape[0]):
        S.switches[s].was = S.switches[s].on


@inner
def flip_back(S):  # type: ignore[no-untyped-def]
    """Turn on the switches that were on at `remember`, and no others."""
    for s in range(S.switches.shape[0]):
        if not S.switches[s].was:
            turn(S, s, 0)
    for s in range(S.switches.shape[0]):
        if S.switches[s].was:
            turn(S, s, 1)


@inner
def add_tried_copy(S, v):  # type: ignore[no-untyped-def]
    """As `derived.add_copy`, for `cost_of_switches`."""
    value = S.val[v]
    if value.tried_dies <= value.tried_born:
        return
    S.diff[value.tried_born + 1] += value.size
    S.diff[value.tried_dies + 1] -= value.size
    if S.meta.credits > 0 and value.tried_dies < S.meta.count:
        last = S.pos[value.tried_dies]
        run = S.var[S.ops[last.order].now + (last.variant & 1)]
        for k in range(run.credit_ptr, run.credit_end):
            if S.idx[k] == v:
                S.moved[value.tried_dies] -= value.size


@inner
def enter_runs(S):  # type: ignore[no-untyped-def]
    """Enter in `diff` what is live and in `moved` what each run needs, after flips; returns (valid, seconds).

    It stops at the first run that is not valid.
    """
    meta = S.meta
    seconds = 0.0
    for p in range(meta.count):
        at = S.pos[p]
        repeat = at.variant & 1
        run = S.var[S.ops[at.order].now + repeat]
        if repeat and run.runs_once:
            return False, seconds
        seconds += run.time
        S.moved[p] = run.out_total + run.workspace
        for k in range(run.in_ptr, run.in_end):
            value = S.val[S.idx[k]]
            if value.tried_born == NEVER or (value.is_tangent and p < meta.boundary):
                return False, seconds
            value.tried_dies = p
        for k in range(run.out_ptr, run.out_end):
            v = S.idx[k]
            value = S.val[v]
            if value.tried_born != NEVER:
                if value.pinned:
                    continue
                add_tried_copy(S, v)
            value.tried_born = p
            value.tried_dies = p
    return True, seconds


@called
def cost_of_switches(S, budget):  # type: ignore[no-untyped-def]
    """Sum the cost of the sequence with the switches of now; returns (valid, seconds, excess).

    The state must be derived, with whatever switches, and does not change.
    """
    meta = S.meta
    count = meta.count
    for v in range(S.val.shape[0]):
        value = S.val[v]
        value.tried_born = meta.boundary - 1 if value.is_tangent else NEVER
        value.tried_dies = value.tried_born
    valid, seconds = enter_runs(S)
    excess = 0.0
    if valid:
        for v in range(S.val.shape[0]):
            value = S.val[v]
            if value.tried_born != NEVER:
                if value.pinned or (value.is_tangent and value.tried_dies == value.tried_born):
                    value.tried_dies = count
                add_tried_copy(S, v)
        held = meta.base
        for p in range(count):
            held += S.diff[p]
            over = held + S.moved[p] - budget
            if over > 0:
                excess += over
    for p in range(count + 2):
        S.diff[p] = 0
    return valid, seconds, excess


@njit
def flip_greedily(S, budget):  # type: ignore[no-untyped-def]
    """Flip single switches while that saves time within the budget; returns the seconds at the end.

    A switch that saves none is turned off: what it adds to a step is not all in the costs.
    """
    seconds, _ = rebuild(S, budget)
    changed = True
    while changed:
        changed = False
        for s in range(S.switches.shape[0]):
            remember(S)
            most = seconds * (1 - EVEN)
            if S.switches[s].on:
                turn(S, s, 0)
                most = seconds * (1 + EVEN)
            else:
                turn_on(S, s)
            valid, new_seconds, new_excess = cost_of_switches(S, budget)
            if valid and new_excess <= 0 and new_seconds <= most:
                changed = changed or new_seconds < seconds * (1 - EVEN)
                seconds = new_seconds
            else:
                flip_back(S)
    return seconds
