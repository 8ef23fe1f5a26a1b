"""The working state of sequence search: arrays that the compiled loops share, allocated once per search.

All data per position, value, op or variant is one record array: few arrays compile and pass quickly.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_solvers.evaluation.arrays import Arrays, Ints, compressed, records
from remat_solvers.evaluation.switch_arrays import SwitchArrays

EXTRAS = 4096  # events of the inserted runs of a change, in addition to those of the widest run

META = (
    "random:u8 count boundary repeats events stamp deleted inserted wanted affected extra bad broken touched "
    "low high base credits seconds:f8 excess:f8 price:f8 price_low:f8 left_s:f8 best_seconds:f8 best_count "
    "tried listings"
)
POSITION = "order variant repeats held own excess:f8 deleted_stamp best"
VALUE = (
    "size pinned producer is_tangent recomputable ev_ptr ev_end ev_capacity affected affected_stamp head "
    "tail head_stamp value_stamp born dies tried_born tried_dies"
)
OP = "first backward op_stamp now best_now need listing"
VARIANT = (
    "time:f8 workspace out_total bound_to_place runs_once recomputes in_ptr in_end out_ptr out_end "
    "credit_ptr credit_end"
)
EXTRA = (
    "in_at in_gap in_op in_key in_variant in_held in_own deleted wanted extra_key extra_made extra_next "
    "stack stack_at listed"
)
TOUCH = "touched touched_by"
SWITCH = "change_ptr change_end conflict_ptr conflict_end on was"
CHANGE = "op row off"


class State(NamedTuple):
    """A sequence and everything derived from it; see `kernels.incremental` for the meaning of a change."""

    meta: np.void  # scalars, one record
    pos: NDArray[Any]  # per position of the sequence
    load: Ints  # per position, its bytes: `held` and `own`
    diff: Ints  # per position, what a change adds to the bytes from there on
    moved: Ints  # per position, its new one when a change is carried out; -1 if deleted
    val: NDArray[Any]  # per value
    ops: NDArray[Any]  # per op
    var: NDArray[Any]  # per variant: the first run of op i is variant `ops[i].now`, its repeat the next one
    extra: NDArray[Any]  # per inserted run or deleted position, and per event of an inserted run
    touch: NDArray[Any]  # per change of what a run at a position needs
    idx: Ints  # what variants read, then what they make, then the dying inputs that an output takes over
    events: Ints  # per value, 2 * position + (1 if made there), in a part that may be longer
    latest: Ints  # per value, its last event; -1 if there is none
    switches: NDArray[Any]  # per switch
    changes: NDArray[Any]  # per switch and op that it changes, the variant that it puts in force
    conflicts: Ints  # per switch, those that it cannot be on with
    families: Ints  # per family, its part of the switches: (start, stop)


def make_state(arrays: Arrays, order: Ints, seed: int, choice: SwitchArrays | None = None) -> State:
    """Create the state for a sequence, with space for 4 times the graph and 1,000 runs.

    With a `choice`, whose arrays these are, all switches are off at first.
    """
    ops, values, variants = len(arrays.backward), len(arrays.size), len(arrays.time)
    cap = max(4 * ops + 1000, 2 * len(order) + 200)
    degree = (len(arrays.in_idx) + len(arrays.out_idx)) / max(1, 2 * ops)
    events = int(cap * (degree + 4)) + 1000
    val = records(VALUE, values)
    val["size"] = arrays.size
    val["pinned"] = arrays.pinned
    val["is_tangent"][arrays.tangents] = 1
    var = records(VARIANT, variants)
    var["time"] = arrays.time
    var["workspace"] = arrays.workspace
    var["in_ptr"], var["in_end"] = arrays.in_ptr[:-1], arrays.in_ptr[1:]
    var["out_ptr"] = arrays.out_ptr[:-1] + len(arrays.in_idx)
    var["out_end"] = arrays.out_ptr[1:] + len(arrays.in_idx)
    guarded = np.diff(arrays.guard_ptr) > 0
    var["bound_to_place"] = guarded | (np.diff(arrays.over_ptr) > 0)
    var["credit_ptr"] = arrays.credit_ptr[:-1] + len(arrays.in_idx) + len(arrays.out_idx)
    var["credit_end"] = arrays.credit_ptr[1:] + len(arrays.in_idx) + len(arrays.out_idx)
    widest = int((np.diff(arrays.in_ptr) + np.diff(arrays.out_ptr)).max(initial=0))
    made = np.concatenate([[0], np.cumsum(arrays.size[arrays.out_idx])])
    var["out_total"] = made[arrays.out_ptr[1:]] - made[arrays.out_ptr[:-1]]
    # A repeat that reads a value overwritten later would not always be valid: such ops run once.
    var["recomputes"][1::2] = arrays.can_rerun[: variants // 2].astype(bool) & ~guarded[1::2]
    var["runs_once"][1::2] = 1 - var["recomputes"][1::2]
    op = records(OP, ops)
    op["backward"] = arrays.backward
    op["now"] = 2 * np.arange(ops) if choice is None else choice.first_row
    val["producer"] = arrays.producer if choice is None else -1
    owner = np.full(variants, -1)  # of the variants in force
    owner[op["now"]] = owner[op["now"] + 1] = np.arange(ops)
    row = np.repeat(np.arange(variants), np.diff(arrays.out_ptr))  # per output
    in_force = owner[row] >= 0
    val["producer"][arrays.out_idx[in_force]] = owner[row[in_force]]
    again = in_force & (var["recomputes"][row] == 1)
    val["recomputable"][arrays.out_idx[again]] = 1
    meta = records(META, 1)[0]
    meta["random"] = (seed * 0x9E3779B97F4A7C15 + 0x1234567) % 2**64 or 1
    meta["base"] = arrays.base_nbytes
    meta["credits"] = len(arrays.credit_idx)
    state = State(
        meta=meta,
        pos=records(POSITION, cap + 8),
        load=np.zeros(cap + 8, np.int64),
        diff=np.zeros(cap + 8, np.int64),
        moved=np.zeros(cap + 8, np.int64),
        val=val,
        ops=op,
        var=var,
        extra=records(EXTRA, EXTRAS + widest),
        touch=records(TOUCH, events),
        idx=np.concatenate([arrays.in_idx, arrays.out_idx, arrays.credit_idx]),
        latest=np.full(values, -1),
        events=np.zeros(2 * events, np.int64),  # parts that values have left count until `rebuild`
        **_switches(choice, var, op["now"]),
    )
    set_order(state, order)
    return state


def _switches(choice: SwitchArrays | None, var: NDArray[Any], now: Ints) -> dict[str, NDArray[Any]]:
    """The arrays of the switches; empty without any."""
    if choice is None:
        return {
            "switches": records(SWITCH, 0),
            "changes": records(CHANGE, 0),
            "conflicts": np.zeros(0, np.int64),
            "families": np.zeros(0, np.int64),
        }
    # A run that runs nothing may come twice, and stays in its place until it does something again.
    var["runs_once"][choice.void == 1] = 0
    var["bound_to_place"] |= choice.void
    switches = records(SWITCH, len(choice.names))
    pointers, ops = compressed([list(each) for each in choice.ops])
    changes = records(CHANGE, len(ops))
    changes["op"], changes["off"] = ops, now[ops]
    changes["row"] = [row for rows in choice.rows for row in rows]
    switches["change_ptr"], switches["change_end"] = pointers[:-1], pointers[1:]
    number = {name: n for n, name in enumerate(choice.names)}
    excluded = [sorted(number[other] for other in choice.conflicts[name]) for name in choice.names]
    pointers, conflicts = compressed(excluded)
    switches["conflict_ptr"], switches["conflict_end"] = pointers[:-1], pointers[1:]
    return {
        "switches": switches,
        "changes": changes,
        "conflicts": conflicts,
        "families": choice.families()[0],
    }


def set_order(state: State, order: Ints) -> None:
    """Replace the sequence; `rebuild` must follow."""
    state.pos["order"][: len(order)] = order
    state.meta["count"] = len(order)


def get_order(state: State) -> Ints:
    """A copy of the sequence."""
    order: Ints = state.pos["order"][: int(state.meta["count"])].copy()
    return order
