"""Compiled flips of switches within a search; `local_search.joint` explains them."""

from remat_solvers.kernels.derived import rebuild
from remat_solvers.kernels.incremental import below, uniform
from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner

EVEN = 1e-9  # ratio of times that are equal but for the order of a sum


@inner
def put(S, op, row, recomputable):  # type: ignore[no-untyped-def]
    """Mark what the variant in force of an op makes; with `recomputable` 0 remove the marks."""
    for variant in range(row, row + 2):
        run = S.var[variant]
        for k in range(run.out_ptr, run.out_end):
            value = S.val[S.idx[k]]
            value.recomputable = recomputable * S.var[variant].recomputes
            value.producer = op


@inner
def turn(S, s, on):  # type: ignore[no-untyped-def]
    """Turn one switch on or off."""
    switch = S.switches[s]
    if switch.on == on:
        return
    switch.on = on
    for k in range(switch.change_ptr, switch.change_end):
        put(S, S.changes[k].op, S.ops[S.changes[k].op].now, 0)
    for k in range(switch.change_ptr, switch.change_end):
        change = S.changes[k]
        row = change.row if on else change.off
        S.ops[change.op].now = row
        put(S, change.op, row, 1)


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


@inner
def flip(S, budget):  # type: ignore[no-untyped-def]
    """Flip one switch, or neighbours of a family to one side; returns (valid, seconds, excess)."""
    family = below(S, S.families.shape[0] - 1)
    start, stop = S.families[family], S.families[family + 1]
    first = start + below(S, stop - start)
    last = first + 1
    if uniform(S) < 0.5:
        last = first + 1 + below(S, stop - first)
        if uniform(S) < 0.2:
            first, last = start, stop
    on = 1 - S.switches[first].on
    for s in range(S.switches.shape[0]):
        S.switches[s].was = S.switches[s].on
    for s in range(first, last):
        if on:
            turn_on(S, s)
        else:
            turn(S, s, 0)
    seconds, excess = rebuild(S, budget)
    return S.meta.broken == 0, seconds, excess


@inner
def flip_back(S, budget):  # type: ignore[no-untyped-def]
    """Undo the last `flip`."""
    for s in range(S.switches.shape[0]):
        if not S.switches[s].was:
            turn(S, s, 0)
    for s in range(S.switches.shape[0]):
        if S.switches[s].was:
            turn(S, s, 1)
    return rebuild(S, budget)


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
            for other in range(S.switches.shape[0]):
                S.switches[other].was = S.switches[other].on
            most = seconds * (1 - EVEN)
            if S.switches[s].on:
                turn(S, s, 0)
                most = seconds * (1 + EVEN)
            else:
                turn_on(S, s)
            new_seconds, new_excess = rebuild(S, budget)
            if S.meta.broken == 0 and new_excess <= 0 and new_seconds <= most:
                changed = changed or new_seconds < seconds * (1 - EVEN)
                seconds = new_seconds
            else:
                flip_back(S, budget)
    return seconds
