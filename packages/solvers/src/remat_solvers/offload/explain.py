"""Explain a plan with offloading: bytes by class and placement, overlapped copies, and reasons in words."""

from collections.abc import Sequence

import attrs

from remat_graph import Lane, Placement, Role, Start, format_nbytes
from remat_solvers.offload.candidate import Candidate

_NAMES = {Role.PARAM: "weights", Role.GRAD: "gradients", Role.OPTIMIZER_STATE: "states"}
_LANES = {
    Lane.TO_HOST: "copies to the host",
    Lane.TO_DEVICE: "copies to the device",
    Lane.CPU_OPTIMIZER: "updates on the CPU",
}


@attrs.frozen(kw_only=True)
class PlacementSummary:
    """Bytes by class and placement."""

    device: dict[str, int]  # bytes of weights, gradients and states placed on the device
    host: dict[str, int]  # bytes of those placed on the host
    moved_nbytes: int  # bytes of activations that are swapped out and in
    params: int  # number of parameters
    host_params: int  # how many of them are placed on the host
    streamed: int  # how many are on the device and have states placed on the host


def summarize_placement(candidate: Candidate) -> PlacementSummary:
    """Count bytes and parameters by placement."""
    graph = candidate.graph
    values = graph.values
    device, host = (dict.fromkeys(_NAMES.values(), 0) for _ in range(2))
    for index, value in enumerate(values):
        if value.role not in _NAMES or value.external:
            continue
        place = value.placement
        if value.role is Role.GRAD:
            place = Placement.DEVICE if value.of is None else values[value.of].placement
        (host if place is Placement.HOST else device)[_NAMES[value.role]] += graph.allocated_nbytes(index)
    placement = {
        i: v.placement for i, v in enumerate(values) if v.role is Role.PARAM and v.placement is not None
    }
    streamed = {
        v.of
        for v in values
        if v.role is Role.OPTIMIZER_STATE and v.placement is Placement.HOST and v.of is not None
        if placement.get(v.of) is Placement.DEVICE
    }
    starts = (step.transfer for step in candidate.schedule.steps if isinstance(step, Start))
    return PlacementSummary(
        device=device,
        host=host,
        moved_nbytes=sum(
            values[transfer.value].nbytes
            for transfer in starts
            if transfer.lane is Lane.TO_HOST and values[transfer.value].placement is None
            if values[transfer.value].role is not Role.GRAD
        ),
        params=len(placement),
        host_params=sum(place is Placement.HOST for place in placement.values()),
        streamed=len(streamed),
    )


def statistics(candidate: Candidate) -> dict[str, int | float | str | bool]:
    """The same as plain numbers: bytes by class, and per lane the overlapped and the exposed seconds."""
    summary, lane_s = summarize_placement(candidate), candidate.timeline.lane_s
    found: dict[str, int | float | str | bool] = {"binds": max(lane_s, key=lambda lane: lane_s[lane]).value}
    for place, by_class in (("device", summary.device), ("host", summary.host)):
        found |= {f"{place}_{name}_nbytes": nbytes for name, nbytes in by_class.items()}
    found["moved_activations_nbytes"] = summary.moved_nbytes
    for lane in _LANES:
        exposed_s = candidate.timeline.waited_s[lane]
        found[f"{lane.value}_hidden_s"] = max(0.0, lane_s[lane] - exposed_s)
        found[f"{lane.value}_exposed_s"] = exposed_s
    found["recomputed_s"] = candidate.timeline.recomputed_s
    return found


def explain(candidate: Candidate, budget_nbytes: int, floor_nbytes: int) -> tuple[str, ...]:
    """Say in a few lines why each class of tensor is placed where it is.

    Some op needs `floor_nbytes` of activations in any plan.
    """
    summary = summarize_placement(candidate)
    whole = sum(summary.device.values()) + sum(summary.host.values())
    return (
        _why_placement(candidate, whole, budget_nbytes, floor_nbytes),
        *_why_classes(summary),
        _why_activations(candidate, summary),
        _what_binds(candidate),
    )


def _why_placement(candidate: Candidate, whole: int, budget_nbytes: int, floor_nbytes: int) -> str:
    held = f"weights, gradients and states need {format_nbytes(whole)}"
    if not candidate.on_host:
        return (
            f"{held}: all of it stays on the device, whose budget of {format_nbytes(budget_nbytes)} holds it"
        )
    if whole + floor_nbytes > budget_nbytes:
        floor, budget = format_nbytes(floor_nbytes), format_nbytes(budget_nbytes)
        return f"{held} and one op needs {floor}, more than the device budget of {budget}: a part must move"
    return f"{held}: a part moves to the host, which saves more recomputation and waiting than it costs"


def _why_classes(summary: PlacementSummary) -> Sequence[str]:
    lines = []
    stay = summary.params - summary.host_params - summary.streamed
    if summary.host_params:
        lines.append(
            f"{summary.host_params} of {summary.params} parameters are placed on the host with gradients "
            f"and states, and the CPU updates them: preferably those that the forward reads last, because "
            f"their updates have the most time"
        )
    if summary.streamed:
        lines.append(
            f"{summary.streamed} parameters stay on the device and have their states on the host, which are "
            f"fetched for the update: the links have time that the CPU lacks"
        )
    if summary.host_params or summary.streamed:
        lines.append(f"{stay} parameters stay on the device with their gradients and states, without copies")
    return lines


def _why_activations(candidate: Candidate, summary: PlacementSummary) -> str:
    again_s = candidate.timeline.recomputed_s
    again = f"{again_s:.3g} s of recomputation" if again_s else "nothing is recomputed"
    if not summary.moved_nbytes:
        return f"activations: none is swapped out; {again}"
    return (
        f"activations: {format_nbytes(summary.moved_nbytes)} are swapped, because they are expensive to "
        f"recompute for their bytes; {again} for the cheap ones"
    )


def _what_binds(candidate: Candidate) -> str:
    timeline = candidate.timeline
    parts = [
        f"{words} {timeline.lane_s[lane]:.3g} s, of which compute waits {timeline.waited_s[lane]:.3g} s"
        for lane, words in _LANES.items()
        if timeline.lane_s[lane]
    ]
    if timeline.starting_s:
        parts.append(f"compute waits {timeline.starting_s:.3g} s for the host to start copies")
    return f"compute takes {timeline.lane_s[Lane.COMPUTE]:.3g} s" + "".join(f"; {part}" for part in parts)
