"""Who is at home where: a linear program over runs of parameters, and its shares as whole parameters.

A parameter has three fates. *Resident*: it, its gradient and its states are on the device. *Streamed*: its
states are at home on the host and pass through the device to be updated there. *On the host*: all of it is at
home there, it is fetched before each use, its gradient leaves, the CPU updates it. Each run of parameters is
shared out between the three, and one number more says how much activation memory an order may ask for: what
the device does not have of it is moved. The program takes the whole step's seconds and makes them small:

* recomputation falls with activation memory along the convex hull of the orders that are known;
* the device's bytes hold at the boundary and at the end, the host's bytes hold;
* each direction's bytes pass in the time there is for them, per prefix of the forward and of the backward;
* updates on the CPU with copies beside them fit between a gradient's birth and the next forward's read. Those
  windows lie within each other, so that one condition for each prefix of the forward says it.

What does not fit are stalls, in the forward, in the backward and before the next forward. A small price on
what moves decides where nothing else does. Shares become whole parameters by passing on what is left over
from run to run. About 100 variables: 0.1 s.

Imperfect: copies are taken as if there were always room to begin them early, so what comes out is a place to
begin; the referee decides (`offload`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph, Links
from remat_solvers.ladder import Rung
from remat_solvers.runs import Param, Run
from remat_solvers.stepping import Style

Floats = NDArray[np.float64]

RESIDENT, STREAMED, ON_HOST = range(3)
PRICE = 0.002  # of moving everything, in base times: below what is measured, above rounding


@attrs.frozen(kw_only=True)
class Terms:
    """What a step has to get by with.

    Attributes:
        device_nbytes: for all that is on the device.
        host_nbytes: for all that is on the host; None for no limit.
        links: bandwidths.
        style: how the step is trained.
        curve: orders known, by their peaks.
        floor_nbytes: what some op needs of activations on the device, whatever moves.
        streams: whether states may be streamed.
    """

    device_nbytes: int
    host_nbytes: int | None
    links: Links
    style: Style
    curve: Sequence[Rung]
    floor_nbytes: int
    streams: bool = True


@attrs.frozen(kw_only=True)
class Shares:
    """What the program says.

    Attributes:
        shares: per run, how much of it has which fate.
        activation_nbytes: peak of the order to use.
        time_s: predicted seconds of a step.
    """

    shares: Floats
    activation_nbytes: int
    time_s: float


def share_out(graph: Graph, runs: Sequence[Run], terms: Terms, moved: float | None = None) -> Shares | None:
    """Solve the program.

    Args:
        graph: the training step.
        runs: its parameters.
        terms: budgets and rates.
        moved: which part of the bytes that could move shall; None for the best.

    Returns:
        the shares, or None if no shares keep the budgets.
    """
    import cvxpy as cp

    style, links = terms.style, terms.links
    weights, grads, states = (
        np.array([getattr(run, name) for run in runs], float)
        for name in ("nbytes", "grad_nbytes", "states_nbytes")
    )
    cpu_s, device_s, read_s, made_s = (
        np.array([getattr(run, name) for run in runs]) for name in ("cpu_s", "device_s", "read_s", "made_s")
    )
    forward_s = sum(op.first.time_s for op in graph.ops if not op.backward)
    backward_s = graph.time_s - forward_s
    out_rate = links.to_host_duplex_nbytes_per_s or links.to_host_nbytes_per_s
    in_rate = links.to_device_duplex_nbytes_per_s or links.to_device_nbytes_per_s
    unit = max(
        1.0, float(terms.device_nbytes)
    )  # bytes are counted in budgets: the solver likes numbers near 1

    share = cp.Variable((3, len(runs)), nonneg=True)
    resident, streamed, on_host = (share[kind] for kind in range(3))
    held, moved_nbytes = cp.Variable(nonneg=True), cp.Variable(nonneg=True)  # activations, in units
    again_s, ahead_s, behind_s, call_s = (cp.Variable(nonneg=True) for _ in range(4))

    def up_to(amounts: Floats, kind: Any) -> Any:
        """Sums over each prefix of the forward."""
        return cp.cumsum(cp.multiply(amounts, kind))

    def onward(amounts: Floats, kind: Any) -> Any:
        """Sums over each prefix of the backward, by the forward's numbers."""
        return cp.sum(cp.multiply(amounts, kind)) - up_to(amounts, kind) + cp.multiply(amounts, kind)

    there = weights + (grads if style.adds else 0.0)
    boundary = (weights + states + (grads if style.adds else 0.0)) @ resident + there @ streamed
    limits = [
        cp.sum(share, axis=0) == 1,
        boundary / unit + held <= 1,
        held >= terms.floor_nbytes / unit,
        held + moved_nbytes <= terms.curve[-1].nbytes / unit,
        held + moved_nbytes >= terms.curve[0].nbytes / unit,
        again_s >= 0,
    ]
    limits += [
        again_s >= rate * (held + moved_nbytes) + at_zero for rate, at_zero in _hull(graph, terms, unit)
    ]
    # States that pass through: a run's worth on its way in, and one on its way out.
    passing = cp.multiply(2 * states / unit, streamed)
    if not style.in_backward:
        outputs = sum(graph.allocated_nbytes(v) for v in graph.outputs)
        end = (weights + states + grads) @ resident + (weights + grads) @ streamed + outputs
        limits.append(end / unit + passing <= 1)
    if not terms.streams:
        limits.append(streamed == 0)
    waiting = 0.5 if style.in_backward else 1.0
    kept = grads * ((1.0 if style.adds else 0.0) + (waiting if style.in_backward or not style.adds else 0.0))
    if terms.host_nbytes is not None:
        on_host_nbytes = states @ streamed + (weights + states + kept) @ on_host
        limits.append(on_host_nbytes / unit + moved_nbytes <= terms.host_nbytes / unit)
    charge = weights + states
    if moved is not None:
        limits.append((charge @ on_host + states @ streamed) / charge.sum() == moved)

    # The links: weights come in for either half of a pass, activations leave and return, gradients leave.
    half_s = again_s + backward_s
    stretched = made_s / max(backward_s, 1e-12)  # where in the backward, however long it takes
    left_s = cp.multiply(1.0 - stretched, half_s)  # from a gradient's birth to the end
    limits += [
        up_to(weights / in_rate, on_host) <= read_s + ahead_s,
        moved_nbytes * unit / out_rate <= forward_s + ahead_s,
        cp.sum(cp.multiply(weights / in_rate, on_host)) + moved_nbytes * unit / in_rate <= half_s + behind_s,
        up_to(grads / out_rate, on_host) <= left_s + behind_s,
    ]
    updated_s = 0.0
    copied = 0.0 if links.host_nbytes_per_s is None else 1.0 / links.host_nbytes_per_s
    cpu = cpu_s + (3 * grads * copied if style.adds else 0.0)
    remaining = read_s / max(forward_s, 1e-12)  # of the activations, when the backward gets to a run
    in_flight = [boundary / unit + held * remaining + passing <= 1]
    if style.in_backward:
        slack = behind_s + call_s
        limits += [
            cp.sum(cp.multiply(weights / in_rate, on_host))
            + cp.sum(cp.multiply(states / in_rate, streamed))
            + moved_nbytes * unit / in_rate
            <= half_s + slack,
            onward(states / in_rate, streamed) <= cp.multiply(stretched, half_s) + slack,
            up_to(grads / out_rate, on_host) + up_to(states / out_rate, streamed) <= left_s + slack,
            up_to(cpu + (2 * weights + grads) * copied, on_host)
            + up_to(2 * states * copied, streamed)
            + moved_nbytes * unit * copied * (1.0 - stretched + read_s / max(forward_s, 1e-12))
            <= left_s + read_s + ahead_s + slack,
            *in_flight,
        ]
    else:
        updated_s = call_s
        limits += [
            cp.sum(cp.multiply(states / min(in_rate, out_rate), streamed)) <= call_s,
            up_to(cpu_s + weights * copied, on_host)
            + cp.sum(cp.multiply(2 * states * copied, streamed))
            + moved_nbytes * unit * copied * read_s / max(forward_s, 1e-12)
            <= call_s + read_s + ahead_s,
        ]
    if style.in_backward:
        updated_s = call_s
    # What is needed last and updated first is the best to be far away.
    dearer = np.linspace(3.0, 1.0, len(runs)) * PRICE * graph.time_s / max(1.0, charge.sum())
    price = (charge * dearer) @ on_host + (states * dearer) @ streamed
    passes = style.micro_batches * (forward_s + half_s + ahead_s + behind_s)
    step_s = passes + updated_s + device_s @ (resident + streamed)
    program = cp.Problem(cp.Minimize((step_s + price) / graph.time_s), limits)
    program.solve(solver=cp.HIGHS)
    if program.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        return None
    return Shares(
        shares=np.clip(share.value, 0.0, 1.0),
        activation_nbytes=int((held.value + moved_nbytes.value) * unit),
        time_s=float(step_s.value),
    )


def _hull(graph: Graph, terms: Terms, unit: float) -> list[tuple[float, float]]:
    """Lines below the seconds of recomputation over activation bytes: (per unit, at zero)."""
    points = sorted((rung.nbytes / unit, rung.time_s - graph.time_s) for rung in terms.curve)
    hull: list[tuple[float, float]] = []
    for point in points:
        if hull and point[0] == hull[-1][0]:
            continue  # of two orders with one peak the faster came first
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    lines = []
    for first, second in pairwise(hull):
        rate = _slope(first, second)
        lines.append((rate, first[1] - rate * first[0]))
    return lines


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def whole_params(runs: Sequence[Run], shares: Floats) -> tuple[frozenset[int], frozenset[int]]:
    """Shares as whole parameters.

    Args:
        runs: the parameters.
        shares: per fate and run.

    Returns:
        parameters on the host, and parameters whose states are streamed.
    """
    owed = np.zeros(3)
    chosen: tuple[list[Param], ...] = ([], [], [])
    for number, run in enumerate(runs):
        owed += shares[:, number] * sum(param.charge_nbytes for param in run.params)
        for param in sorted(run.params, key=lambda param: -param.charge_nbytes):
            fates = [RESIDENT, ON_HOST]
            if param.update is not None and param.states_nbytes:
                fates.append(STREAMED)
            fate = max(fates, key=lambda fate: owed[fate])
            owed[fate] -= param.charge_nbytes
            chosen[fate].append(param)
    return (
        frozenset(param.index for param in chosen[ON_HOST]),
        frozenset(param.index for param in chosen[STREAMED]),
    )
