"""Why everything is where it is in a plan that moves: bytes by class and place, what hides, and in words."""

from collections.abc import Sequence

import attrs

from remat_graph import Lane, Placement, Role, Start, format_nbytes
from remat_solvers.offload.candidate import Attempt

_NAMES = {Role.PARAM: "weights", Role.GRAD: "gradients", Role.OPTIMIZER_STATE: "states"}
_LANES = {
    Lane.TO_HOST: "copies to the host",
    Lane.TO_DEVICE: "copies to the device",
    Lane.CPU_OPTIMIZER: "updates on the CPU",
}


@attrs.frozen(kw_only=True)
class Places:
    """Bytes by class and place.

    Attributes:
        device: bytes of weights, gradients and states that belong to the device.
        host: those that belong to the host.
        moved_nbytes: bytes of activations that go to the host and come back.
        params: how many parameters there are.
        away: how many of them are placed on the host.
        streamed: how many are on the device and have states placed on the host.
    """

    device: dict[str, int]
    host: dict[str, int]
    moved_nbytes: int
    params: int
    away: int
    streamed: int


def places(one: Attempt) -> Places:
    """Count."""
    graph = one.graph
    values = graph.values
    device, host = (dict.fromkeys(_NAMES.values(), 0) for _ in range(2))
    for index, value in enumerate(values):
        if value.role not in _NAMES or value.external:
            continue
        home = value.placement
        if value.role is Role.GRAD:
            home = Placement.DEVICE if value.of is None else values[value.of].placement
        (host if home is Placement.HOST else device)[_NAMES[value.role]] += graph.allocated_nbytes(index)
    homes = {i: v.placement for i, v in enumerate(values) if v.role is Role.PARAM and v.placement is not None}
    streamed = {
        v.of
        for v in values
        if v.role is Role.OPTIMIZER_STATE and v.placement is Placement.HOST and v.of is not None
        if homes.get(v.of) is Placement.DEVICE
    }
    starts = (step.transfer for step in one.schedule.steps if isinstance(step, Start))
    return Places(
        device=device,
        host=host,
        moved_nbytes=sum(
            values[transfer.value].nbytes
            for transfer in starts
            if transfer.lane is Lane.TO_HOST and values[transfer.value].placement is None
            if values[transfer.value].role is not Role.GRAD
        ),
        params=len(homes),
        away=sum(home is Placement.HOST for home in homes.values()),
        streamed=len(streamed),
    )


def binding(one: Attempt) -> str:
    """The lane with the most to do."""
    lane_s = one.timeline.lane_s
    return max(lane_s, key=lambda lane: lane_s[lane]).value


def statistics(one: Attempt) -> dict[str, int | float | str | bool]:
    """The same as plain numbers: bytes by class, per lane what hides and what computing waits for."""
    there = places(one)
    found: dict[str, int | float | str | bool] = {"binds": binding(one)}
    for place, by_class in (("device", there.device), ("host", there.host)):
        found |= {f"{place}_{name}_nbytes": nbytes for name, nbytes in by_class.items()}
    found["moved_activations_nbytes"] = there.moved_nbytes
    for lane in _LANES:
        exposed_s = one.timeline.waited_s[lane]
        found[f"{lane.value}_hidden_s"] = max(0.0, one.timeline.lane_s[lane] - exposed_s)
        found[f"{lane.value}_exposed_s"] = exposed_s
    found["recomputed_s"] = one.timeline.recomputed_s
    return found


def explain(one: Attempt, budget_nbytes: int, floor_nbytes: int) -> tuple[str, ...]:
    """Say in a few lines why each class of tensor is where it is.

    Args:
        one: the plan.
        budget_nbytes: of the device.
        floor_nbytes: what some op needs of activations, whatever moves.
    """
    there = places(one)
    whole = sum(there.device.values()) + sum(there.host.values())
    return (
        _why_homes(one, there, whole, budget_nbytes, floor_nbytes),
        *_why_classes(there),
        _why_activations(one, there),
        _what_binds(one),
    )


def _why_homes(one: Attempt, there: Places, whole: int, budget_nbytes: int, floor_nbytes: int) -> str:
    held = f"weights, gradients and states take {format_nbytes(whole)}"
    op = f"beside the {format_nbytes(floor_nbytes)} that one op needs"
    if not one.on_host:
        return f"{held}: all of it stays on the device, whose {format_nbytes(budget_nbytes)} have room for it"
    if whole + floor_nbytes > budget_nbytes:
        return f"{held}, {op} more than the device's {format_nbytes(budget_nbytes)}: a part must leave"
    return f"{held}: a part leaves, which saves more recomputation and waiting than it costs"


def _why_classes(there: Places) -> Sequence[str]:
    lines = []
    stay = there.params - there.away - there.streamed
    if there.away:
        lines.append(
            f"{there.away} of {there.params} parameters are placed on the host with gradients and states, "
            f"and the CPU updates them: those first of all that the forward needs last, whose updates have "
            f"the most time"
        )
    if there.streamed:
        lines.append(
            f"{there.streamed} parameters stay on the device and have their states on the host, which pass "
            f"through the device to be updated: the links have time that the CPU lacks"
        )
    if there.away or there.streamed:
        lines.append(f"{stay} parameters stay on the device with all they have: what is there is not copied")
    return lines


def _why_activations(one: Attempt, there: Places) -> str:
    again_s = one.timeline.recomputed_s
    again = f"{again_s:.3g} s of recomputation" if again_s else "nothing is computed again"
    if not there.moved_nbytes:
        return f"activations: none moves; {again}"
    return (
        f"activations: {format_nbytes(there.moved_nbytes)} go to the host and back, dear to compute again "
        f"for their bytes; {again} for those that are cheap"
    )


def _what_binds(one: Attempt) -> str:
    timeline = one.timeline
    parts = [
        f"{words} {timeline.lane_s[lane]:.3g} s, {timeline.waited_s[lane]:.3g} s of it waited for"
        for lane, words in _LANES.items()
        if timeline.lane_s[lane]
    ]
    return f"computing takes {timeline.lane_s[Lane.COMPUTE]:.3g} s" + "".join(f"; {part}" for part in parts)
